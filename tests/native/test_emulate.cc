// How the emulator of CUDA runs the threads and blocks of a launch, and in which order.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/launch.h"

namespace strata {
namespace {

using emulate::SetOrder;

constexpr uint64_t kOrders[] = {0, 1, 2, 3, 12345};

// In place: every thread reads its mirror's value between two barriers.
__global__ void ReverseKernel(int* values) {
  __shared__ int kept[1024];
  kept[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

__global__ void RacyReverseKernel(int* values) {
  __shared__ int kept[1024];
  kept[threadIdx.x] = values[threadIdx.x];
  values[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

// Round after round through the same memory: right only with the barrier at the end of a round.
template <bool kBarrier>
__global__ void RotateKernel(int* values) {
  STRATA_SHARED(int, kept);
  for (int round = 0; round < 5; ++round) {
    kept[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = kept[(threadIdx.x + 1) % blockDim.x];
    if (kBarrier) __syncthreads();
  }
}

// As RotateKernel among the lanes of a warp, which need not run in step.
template <bool kBarrier>
__global__ void RotateLanesKernel(int* values) {
  STRATA_SHARED(int, kept);
  kept[threadIdx.x] = values[threadIdx.x];
  if (kBarrier) __syncwarp();
  values[threadIdx.x] = kept[threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32];
}

std::vector<int> Counting(int count) {
  std::vector<int> values(count);
  for (int i = 0; i < count; ++i) values[i] = i;
  return values;
}

void TestMeetsAtBarriersInEveryOrder() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    for (const int threads : {1, 31, 33, 200, seed == 0 ? 1024 : 64}) {
      std::vector<int> values = Counting(threads);
      CHECK_EQ(Launch(ReverseKernel, {dim3(1), dim3(threads)}, values.data()), "");
      for (int i = 0; i < threads; ++i) CHECK_EQ(values[i], threads - 1 - i);
    }
  }
  SetOrder(0);
}

// Whether any order gives other results than the natural one of `right`.
bool Differs(void (*right)(int*), void (*kernel)(int*)) {
  std::vector<int> expected = Counting(64);
  CHECK_EQ(Launch(right, {dim3(1), dim3(64), 256}, expected.data()), "");
  bool differs = false;
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    std::vector<int> values = Counting(64);
    CHECK_EQ(Launch(kernel, {dim3(1), dim3(64), 256}, values.data()), "");
    differs = differs || values != expected;
  }
  SetOrder(0);
  return differs;
}

void TestAMissingBarrierShowsInSomeOrder() {
  CHECK(!Differs(ReverseKernel, ReverseKernel));
  CHECK(Differs(ReverseKernel, RacyReverseKernel));
  CHECK(!Differs(RotateKernel<true>, RotateKernel<true>));
  CHECK(Differs(RotateKernel<true>, RotateKernel<false>));
  CHECK(!Differs(RotateLanesKernel<true>, RotateLanesKernel<true>));
  CHECK(Differs(RotateLanesKernel<true>, RotateLanesKernel<false>));
}

__global__ void EndedThreadsKernel(int* sum, int alive) {
  if (static_cast<int>(threadIdx.x) >= alive) return;
  const int all = __syncthreads_count(threadIdx.x % 2);
  if (threadIdx.x == 0) *sum = all;
}

void TestThreadsThatEndedAreNotWaitedFor() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    for (const int alive : {1, 40, 127, 128}) {
      int sum = -1;
      CHECK_EQ(Launch(EndedThreadsKernel, {dim3(1), dim3(128)}, &sum, alive), "");
      CHECK_EQ(sum, alive / 2);
    }
  }
  SetOrder(0);
}

template <typename T>
__global__ void ShuffleKernel(T* results) {
  const int lane = threadIdx.x;
  const T own = static_cast<T>(lane + 100);
  T* result = results + lane * 6;
  result[0] = __shfl_sync(0xffffffffu, own, 5);
  result[1] = __shfl_xor_sync(0xffffffffu, own, 16);
  result[2] = __shfl_down_sync(0xffffffffu, own, 4);
  result[3] = __shfl_up_sync(0xffffffffu, own, 4);
  result[4] = __shfl_down_sync(0xffffffffu, own, 1, 8);
  result[5] = __shfl_sync(0xffffffffu, own, 9, 8);
}

template <typename T>
void CheckShuffles() {
  std::vector<T> results(32 * 6);
  CHECK_EQ(Launch(ShuffleKernel<T>, {dim3(1), dim3(32)}, results.data()), "");
  for (int lane = 0; lane < 32; ++lane) {
    const int expected[] = {5,
                            lane ^ 16,
                            lane + 4 < 32 ? lane + 4 : lane,
                            lane >= 4 ? lane - 4 : lane,
                            lane % 8 < 7 ? lane + 1 : lane,
                            lane / 8 * 8 + 1};
    for (int i = 0; i < 6; ++i) CHECK_EQ(results[lane * 6 + i], static_cast<T>(expected[i] + 100));
  }
}

void TestShufflesAsCudaDoes() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    CheckShuffles<int>();
    CheckShuffles<unsigned>();
    CheckShuffles<float>();
    CheckShuffles<long long>();
  }
  SetOrder(0);
}

__global__ void VoteKernel(unsigned* results) {
  const unsigned lane = threadIdx.x % 32;
  unsigned* result = results + threadIdx.x * 6;
  // Halves of a warp meet apart from each other.
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  result[0] = __ballot_sync(half, lane % 2);
  result[1] = __any_sync(half, lane == 3);
  result[2] = __all_sync(half, lane < 16);
  result[3] = __reduce_add_sync(half, lane);
  result[4] = __match_any_sync(0xffffffffu, static_cast<int>(lane % 3));
  __syncwarp();
  result[5] = __reduce_max_sync(0xffffffffu, 1000 - lane);
}

void TestVotesAmongTheMaskOnly() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    std::vector<unsigned> results(64 * 6);
    CHECK_EQ(Launch(VoteKernel, {dim3(1), dim3(64)}, results.data()), "");
    for (unsigned t = 0; t < 64; ++t) {
      const bool low = t % 32 < 16;
      const unsigned* result = results.data() + t * 6;
      CHECK_EQ(result[0], low ? 0x0000aaaau : 0xaaaa0000u);
      CHECK_EQ(result[1], low ? 1u : 0u);
      CHECK_EQ(result[2], low ? 1u : 0u);
      CHECK_EQ(result[3], low ? 120u : 376u);
      CHECK_EQ(result[4], 0x49249249u << t % 32 % 3);
      CHECK_EQ(result[5], 1000u);
    }
  }
  SetOrder(0);
}

__global__ void WhereKernel(unsigned* seen) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  seen[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

void TestEveryThreadOfEveryBlockRunsOnce() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    std::vector<unsigned> seen(3 * 4 * 5 * 6 * 7 * 2);
    CHECK_EQ(Launch(WhereKernel, {dim3(3, 4, 5), dim3(6, 7, 2)}, seen.data()), "");
    for (const unsigned times : seen) CHECK_EQ(times, 1u);
  }
  SetOrder(0);
}

__global__ void OrderKernel(int* order, unsigned* next) {
  order[atomicAdd(next, 1u)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

void TestTheSeedIsTheOrder() {
  std::vector<std::vector<int>> orders;
  for (const uint64_t seed : {0, 1, 2, 2, 3}) {
    SetOrder(seed);
    unsigned next = 0;
    orders.emplace_back(4 * 40);
    CHECK_EQ(Launch(OrderKernel, {dim3(4), dim3(40)}, orders.back().data(), &next), "");
  }
  SetOrder(0);
  CHECK(orders[0] == Counting(160));
  CHECK(std::vector<int>(orders[1].rbegin(), orders[1].rend()) == orders[0]);
  CHECK(orders[2] == orders[3]);
  CHECK(orders[2] != orders[0] && orders[2] != orders[4]);
}

// The last block to arrive adds what all have left.
__global__ void LastBlockKernel(unsigned* arrived, int* parts, int* sum) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = static_cast<int>(blockIdx.x);
    __threadfence();
    last = atomicAdd(arrived, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  int total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += parts[b];
  *sum = total;
}

void TestTheLastBlockSeesAllOthers() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    unsigned arrived = 0;
    std::vector<int> parts(10);
    int sum = 0;
    CHECK_EQ(Launch(LastBlockKernel, {dim3(10), dim3(64)}, &arrived, parts.data(), &sum), "");
    CHECK_EQ(sum, 45);
  }
  SetOrder(0);
}

__global__ void WaitForOtherKernel(unsigned* flag, int* sum) {
  if (threadIdx.x == 0) {
    while (__ldcv(flag) == 0) __nanosleep(100);
    *sum += 1;
  }
  if (threadIdx.x == blockDim.x - 1) atomicExch(flag, 1u);
}

void TestASleepingThreadLetsOthersRun() {
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    unsigned flag = 0;
    int sum = 0;
    CHECK_EQ(Launch(WaitForOtherKernel, {dim3(1), dim3(96)}, &flag, &sum), "");
    CHECK_EQ(sum, 1);
  }
  SetOrder(0);
}

void TestLaunchesOfManyThreadsTakeTurns() {
  const int64_t before = emulate::NumLaunches();
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([] {
      for (int round = 0; round < 20; ++round) {
        std::vector<int> values = Counting(64);
        CHECK_EQ(Launch(ReverseKernel, {dim3(1), dim3(64)}, values.data()), "");
        CHECK_EQ(values[0], 63);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(emulate::NumLaunches() - before, int64_t{80});
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestMeetsAtBarriersInEveryOrder);
  RUN(TestAMissingBarrierShowsInSomeOrder);
  RUN(TestThreadsThatEndedAreNotWaitedFor);
  RUN(TestShufflesAsCudaDoes);
  RUN(TestVotesAmongTheMaskOnly);
  RUN(TestEveryThreadOfEveryBlockRunsOnce);
  RUN(TestTheSeedIsTheOrder);
  RUN(TestTheLastBlockSeesAllOthers);
  RUN(TestASleepingThreadLetsOthersRun);
  RUN(TestLaunchesOfManyThreadsTakeTurns);
}
