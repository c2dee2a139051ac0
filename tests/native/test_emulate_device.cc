// What the emulator of CUDA has of a device (memory, arithmetic, streams), and what it says about
// kernels that are wrong.
#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/async_copy.cuh"
#include "cuda/barriers.cuh"
#include "cuda/group_mma.cuh"
#include "cuda/group_mma_floats.cuh"

namespace strata {
namespace {

using emulate::SetOrder;

constexpr uint64_t kOrders[] = {0, 1, 2, 3, 12345};

__global__ void DynamicSharedKernel(float* first, const float* x, float* sum, int count) {
  STRATA_SHARED(float, kept);
  if (threadIdx.x == 0) first[blockIdx.x] = kept[count - 1];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) kept[i] = x[i] * (blockIdx.x + 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int i = 0; i < count; ++i) total += kept[i];
    sum[blockIdx.x] = total;
  }
}

void TestSharedMemoryIsNanWhenABlockStarts() {
  constexpr int kCount = 20000;
  const std::vector<float> x(kCount, 1.0f);
  float first[3], sum[3];
  CHECK_EQ(
      Launch(DynamicSharedKernel, {dim3(3), dim3(64), kCount * 4}, first, x.data(), sum, kCount),
      "");
  for (int b = 0; b < 3; ++b) {
    CHECK(first[b] != first[b]);
    CHECK_EQ(sum[b], static_cast<float>(kCount * (b + 1)));
  }
}

__device__ inline int* HelperShared() {
  __shared__ int kept[3];
  return kept;
}

__global__ void StaticSharedKernel(int* found) {
  __shared__ int kept[5];
  __shared__ bool flag;
  if (threadIdx.x == 0) {
    found[blockIdx.x] = kept[4] + HelperShared()[1];
    kept[4] = HelperShared()[1] = 7;
    flag = true;
  }
  __syncthreads();
  if (threadIdx.x == 1) found[blockIdx.x] += flag;
}

void TestSoAreSharedVariables() {
  int found[2];
  CHECK_EQ(Launch(StaticSharedKernel, {dim3(2), dim3(32)}, found), "");
  CHECK_EQ(found[0], -1);  // -1, -1 and the flag
  CHECK_EQ(found[1], -1);
}

__global__ void WritePastKernel() {
  STRATA_SHARED(int, kept);
  kept[threadIdx.x] = 1;
}

void TestWritingPastSharedMemoryIsAnError() {
  CHECK_EQ(Launch(WritePastKernel, {dim3(1), dim3(32), 128}), "");
  CHECK_CONTAINS(Launch(WritePastKernel, {dim3(1), dim3(33), 128}),
                 "wrote past its 128 bytes of dynamic shared memory");
}

__global__ void StuckKernel(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else if (threadIdx.x < 40) {
    *out = __shfl_sync(0xffffffffu, 1, 0);
  } else if (threadIdx.x < 64) {
    __syncwarp(0xffffff00u);
    *out = __shfl_sync(0xffffff01u, 1, 0);
  }
}

void TestADeadlockNamesItsPlaces() {
  int out = 0;
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    const std::string error = Launch(StuckKernel, {dim3(2), dim3(96)}, &out);
    CHECK_CONTAINS(error, "deadlock in block (");
    CHECK_CONTAINS(error, "32 wait for the block at");
    CHECK_CONTAINS(error, "8 wait for lanes 0xffffffff at");
    CHECK_CONTAINS(error, "24 wait for lanes 0xffffff01 at");
    CHECK_CONTAINS(error, "test_emulate_device.cc:");
    CHECK_CONTAINS(error, "in StuckKernel, the first is (32, 0, 0)");
    CHECK_CONTAINS(error, "32 have ended");
    CHECK_EQ(Launch(StuckKernel, {dim3(1), dim3(1)}, &out), "");  // alone it meets itself
  }
  SetOrder(0);
}

__global__ void TwoBarriersKernel() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void NotInMaskKernel() { __syncwarp(0x1u); }

__global__ void TwoOperationsKernel(int* out) {
  *out = threadIdx.x == 0 ? __any_sync(0xffffffffu, 1) : __all_sync(0xffffffffu, 1);
}

__global__ void SelectorKernel(unsigned* out) { *out = __byte_perm(1, 2, 0x8000); }

void TestWhatCudaLeavesUndefinedIsAnError() {
  int out = 0;
  unsigned word = 0;
  CHECK_CONTAINS(Launch(TwoBarriersKernel, {dim3(1), dim3(64)}), "all must meet at one");
  CHECK_CONTAINS(Launch(NotInMaskKernel, {dim3(1), dim3(2)}), "its lane is not in the mask");
  CHECK_CONTAINS(Launch(TwoOperationsKernel, {dim3(1), dim3(32)}, &out), "another operation");
  CHECK_CONTAINS(Launch(SelectorKernel, {dim3(1), dim3(1)}, &word), "a selector above 7");
  CHECK_CONTAINS(Launch(NotInMaskKernel, {dim3(1), dim3(1025)}), "at most 1024");
  CHECK_CONTAINS(Launch(NotInMaskKernel, {dim3(0), dim3(1)}), "a grid of (0, 1, 1)");
  CHECK_CONTAINS(Launch(NotInMaskKernel, {dim3(1), dim3(1), 100 * 1024}), "of shared memory");
}

enum class Without { kNothing, kCopies, kPublication, kFence, kSums, kOwnSums };

// The sum of 32 products of a group, each of rows and columns that are all equal.
__global__ void GroupKernel(const uint8_t* rows, int* sum, Without without) {
  STRATA_SHARED(uint8_t, shared);
  constexpr int kChunks = (64 + 16) * 8;
  for (int i = threadIdx.x; i < kChunks; i += blockDim.x) {
    CopyBytesAsync<16>(shared + i * 16, rows);
  }
  if (without != Without::kCopies) WaitForCopies();
  if (without != Without::kPublication) PublishToUnits();
  __syncthreads();
  if (without != Without::kFence) GroupFence();
  int d[2][4];
  BeginGroupMma(d, GroupOperand(shared, 32), GroupOperand(shared + 64 * 128, 32));
  if (without == Without::kOwnSums) {
    WaitForSums<1>(d);
  } else if (without != Without::kSums) {
    WaitForSums<0>(d);
  }
  sum[threadIdx.x] = d[1][3];
}

void TestWhatIsBegunAndNotWaitedForIsAnError() {
  alignas(16) uint8_t rows[16];
  std::fill_n(rows, 16, uint8_t{3});
  std::vector<int> sums(128);
  const auto run = [&](Without without) {
    return Launch(GroupKernel, {dim3(1), dim3(128), 80 * 128}, rows, sums.data(), without);
  };
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    CHECK_CONTAINS(run(Without::kCopies), "had not waited for this");
    CHECK_CONTAINS(run(Without::kPublication), "copied and not published");
    CHECK_CONTAINS(run(Without::kFence), "no fence");
    CHECK_CONTAINS(run(Without::kSums), "had not waited for this");
    CHECK_CONTAINS(run(Without::kOwnSums), "that is not waited for");
    CHECK_EQ(run(Without::kNothing), "");
    for (const int sum : sums) CHECK_EQ(sum, 32 * 9);
  }
  SetOrder(0);
}

enum class Left { kNothing, kBytes, kFence, kEnd, kProducts, kOperand, kSums };

// Two times 16 products of twos, rows in shared memory and in registers, and 3; without what is
// left out.
__global__ void FloatGroupKernel(const uint8_t* operand, float* sum, Left left) {
  STRATA_SHARED(uint8_t, shared);
  __shared__ Barrier full;
  constexpr int kLine = 64 * 16;
  if (threadIdx.x == 0) InitBarrier(&full, 1);
  __syncthreads();
  if (threadIdx.x == 5) {
    CopyBulk(shared, operand, 2 * kLine, &full);
    ExpectBytes(&full, 2 * kLine);
  }
  if (left != Left::kBytes) AwaitPhase(&full, 0);
  float d[5][4];
  for (float (&four)[4] : d) four[0] = four[1] = four[2] = four[3] = 3.0f;
  if (left != Left::kFence) GroupFence();
  const uint64_t twos = ColumnsOperand(shared, kLine);
  uint32_t rows[4] = {0x40004000, 0x40004000, 0x40004000, 0x40004000};
  BeginGroupMma(d, twos, twos);
  BeginGroupMma(d, rows, twos);
  if (left != Left::kEnd) EndProducts();
  if (left == Left::kOperand) rows[2] = 0;
  if (left == Left::kSums) d[4][1] = 0.0f;
  if (left != Left::kProducts) WaitForProducts<0>();
  sum[threadIdx.x] = d[4][3];
}

void TestSoAreFloatsAndBulkCopies() {
  alignas(16) uint16_t twos[2 * 64 * 8];
  std::fill_n(twos, 2 * 64 * 8, uint16_t{0x4000});
  std::vector<float> sums(128);
  const auto run = [&](Left left) {
    return Launch(FloatGroupKernel, {dim3(1), dim3(128), sizeof(twos)},
                  reinterpret_cast<const uint8_t*>(twos), sums.data(), left);
  };
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    CHECK_CONTAINS(run(Left::kBytes), "had not waited for this");
    CHECK_CONTAINS(run(Left::kFence), "no fence");
    CHECK_CONTAINS(run(Left::kEnd), "had not waited for this");
    CHECK_CONTAINS(run(Left::kProducts), "had not waited for this");
    CHECK_CONTAINS(run(Left::kOperand), "changed before it was waited for");
    CHECK_CONTAINS(run(Left::kSums), "changed before they were there");
    CHECK_EQ(run(Left::kNothing), "");
    for (const float sum : sums) CHECK_EQ(sum, 3.0f + 2 * 16 * 4);
  }
  SetOrder(0);
}

// Half of the threads wait for the others, who are fewer than the barrier expects.
__global__ void PhaseKernel(int* seen, int expected) {
  __shared__ Barrier barrier;
  __shared__ int value;
  if (threadIdx.x == 0) InitBarrier(&barrier, expected);
  __syncthreads();
  if (threadIdx.x < 32) {
    AwaitPhase(&barrier, 0);
    seen[threadIdx.x] = value;
  } else {
    value = 5;
    ArriveAt(&barrier);
  }
}

void TestAPhaseThatNobodyEndsIsAnError() {
  std::vector<int> seen(32);
  for (const uint64_t seed : kOrders) {
    SetOrder(seed);
    CHECK_CONTAINS(Launch(PhaseKernel, {dim3(1), dim3(64)}, seen.data(), 33), "what nobody does");
    CHECK_EQ(Launch(PhaseKernel, {dim3(1), dim3(64)}, seen.data(), 32), "");
    for (const int value : seen) CHECK_EQ(value, 5);
  }
  SetOrder(0);
}

__global__ void ArithmeticKernel(int* ints, unsigned* words, float* floats) {
  ints[0] = __dp4a(static_cast<int>(0x80ff7f01u), static_cast<int>(0x80017f02u), 5);
  words[0] = __dp4a(0x80ff7f01u, 0x80017f02u, 5u);
  words[1] = __byte_perm(0x33221100u, 0x77665544u, 0x7012u);
  words[2] = __funnelshift_l(0x80000001u, 0x12345678u, 4);
  words[3] = __funnelshift_r(0x80000001u, 0x12345678u, 4);
  ints[1] = __popc(0xf0f0u) + __clz(0) + __ffs(0) + __ffs(8);
  ints[2] = __float2int_rn(2.5f) + __float2int_rn(3.5f) + __float2int_rn(NAN);
  ints[3] = __float2int_rn(3e9f);
  words[4] = __float_as_uint(1.0f);
  floats[0] = __fmaf_rn(0x1.001p0f, 0x1.001p0f, -1.0f);
  floats[1] = __fmul_rn(0x1p-100f, 0x1p-30f);  // subnormal
  floats[2] = max(min(2.0f, 3.0f), 1.0f);
  ints[4] = max(min(2, 3), -1);
}

void TestComputesAsTheDeviceDoes() {
#if defined(__x86_64__)
  const unsigned saved = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(saved | 0x8040);  // flushes subnormals, as XLA's threads do
#endif
  int ints[5];
  unsigned words[5];
  float floats[3];
  CHECK_EQ(Launch(ArithmeticKernel, {dim3(1), dim3(1)}, ints, words, floats), "");
#if defined(__x86_64__)
  CHECK(__builtin_ia32_stmxcsr() & 0x8040);
  __builtin_ia32_ldmxcsr(saved);
#endif
  CHECK_EQ(ints[0], 128 * 128 - 1 + 127 * 127 + 2 + 5);
  CHECK_EQ(words[0], 128u * 128 + 255 + 127 * 127 + 2 + 5);
  CHECK_EQ(words[1], 0x77001122u);
  CHECK_EQ(words[2], 0x23456788u);
  CHECK_EQ(words[3], 0x88000000u);
  CHECK_EQ(ints[1], 8 + 32 + 0 + 4);
  CHECK_EQ(ints[2], 2 + 4 + 0);
  CHECK_EQ(ints[3], 2147483647);
  CHECK_EQ(words[4], 0x3f800000u);
  CHECK_EQ(floats[0], 0x1.0008p-11f);
  CHECK_EQ(floats[1], 0x1p-130f);
  CHECK_EQ(floats[2], 2.0f);
  CHECK_EQ(ints[4], 2);
}

void TestDeviceMemoryHasALimitAndSides() {
  emulate::SetDeviceMemory(1 << 20);
  float* device = nullptr;
  CHECK_EQ(int{cudaMalloc(&device, 2 << 20)}, int{cudaErrorMemoryAllocation});
  CHECK_EQ(int{cudaGetLastError()}, int{cudaErrorMemoryAllocation});
  CHECK_EQ(int{cudaGetLastError()}, int{cudaSuccess});
  CHECK_EQ(int{cudaMalloc(&device, 1000)}, 0);
  CHECK(device[249] != device[249]);
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK_EQ(total_bytes - free_bytes, size_t{1000});
  std::vector<float> host(300, 2.0f);
  CHECK_EQ(int{cudaMemcpy(device, host.data(), 1000, cudaMemcpyHostToDevice)}, 0);
  CHECK_EQ(device[249], 2.0f);
  CHECK_EQ(int{cudaMemcpy(device, host.data(), 1200, cudaMemcpyHostToDevice)}, 1);
  CHECK_EQ(int{cudaMemcpy(device, host.data(), 1000, cudaMemcpyDeviceToHost)}, 1);
  CHECK_EQ(int{cudaMemset(device, 0, 1001)}, 1);
  CHECK_EQ(int{cudaMemset(device, 0, 1000)}, 0);
  CHECK_EQ(int{cudaFree(device + 1)}, 1);
  CHECK_EQ(int{cudaFree(device)}, 0);
  CHECK_EQ(emulate::DeviceBytes(), size_t{0});
  CHECK_EQ(int{cudaHostRegister(host.data(), 1200, 0)}, 0);
  CHECK_EQ(int{cudaHostRegister(host.data() + 9, 4, 0)}, 712);
  CHECK_EQ(emulate::PinnedBytes(), size_t{1200});
  CHECK_EQ(int{cudaHostUnregister(host.data())}, 0);
}

void TestStreamsAndEventsAreDone() {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr, end = nullptr;
  CHECK_EQ(int{cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)}, 0);
  CHECK_EQ(int{cudaEventCreate(&start)} + int{cudaEventCreate(&end)}, 0);
  CHECK_EQ(int{cudaEventRecord(start, stream)} + int{cudaEventRecord(end, stream)}, 0);
  CHECK_EQ(int{cudaStreamWaitEvent(stream, end)} + int{cudaEventSynchronize(end)}, 0);
  float milliseconds = -1.0f;
  CHECK_EQ(int{cudaEventElapsedTime(&milliseconds, start, end)}, 0);
  CHECK(milliseconds >= 0.0f);
  CHECK_EQ(int{cudaEventDestroy(start)} + int{cudaEventDestroy(end)}, 0);
  CHECK_EQ(int{cudaStreamSynchronize(stream)} + int{cudaStreamDestroy(stream)}, 0);
}

void TestADeviceHasItsOwnMemoryStreamsAndEvents() {
  float* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  CHECK_EQ(int{cudaSetDevice(1)}, 0);
  CHECK_EQ(int{cudaMalloc(&memory, 1000)}, 0);
  CHECK_EQ(int{cudaStreamCreate(&stream)} + int{cudaEventCreate(&event)}, 0);
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK_EQ(total_bytes - free_bytes, size_t{1000});
  CHECK_EQ(int{cudaEventRecord(event, stream)}, 0);
  CHECK_EQ(int{cudaSetDevice(0)}, 0);
  cudaMemGetInfo(&free_bytes, &total_bytes);
  CHECK_EQ(total_bytes, free_bytes);
  CHECK_EQ(int{cudaEventRecord(event)}, int{cudaErrorInvalidResourceHandle});
  CHECK_EQ(int{cudaStreamWaitEvent(nullptr, event)}, 0);
  CHECK_CONTAINS(Launch(WritePastKernel, {dim3(1), dim3(32), 128, stream}), "another device");
  CHECK_EQ(int{cudaFree(memory)}, 0);
  CHECK_EQ(emulate::DeviceBytes(), size_t{0});
  CHECK_EQ(int{cudaEventDestroy(event)} + int{cudaStreamDestroy(stream)}, 0);
  CHECK_EQ(int{cudaSetDevice(2)}, int{cudaErrorInvalidDevice});
  cudaGetLastError();
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestSharedMemoryIsNanWhenABlockStarts);
  RUN(TestSoAreSharedVariables);
  RUN(TestWritingPastSharedMemoryIsAnError);
  RUN(TestADeadlockNamesItsPlaces);
  RUN(TestWhatCudaLeavesUndefinedIsAnError);
  RUN(TestWhatIsBegunAndNotWaitedForIsAnError);
  RUN(TestSoAreFloatsAndBulkCopies);
  RUN(TestAPhaseThatNobodyEndsIsAnError);
  RUN(TestComputesAsTheDeviceDoes);
  RUN(TestDeviceMemoryHasALimitAndSides);
  RUN(TestStreamsAndEventsAreDone);
  RUN(TestADeviceHasItsOwnMemoryStreamsAndEvents);
}
