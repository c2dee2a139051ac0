// Launches: one at a time, their blocks one after another.
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "emulate/block.h"
#include "emulate/cuda.h"
#include "emulate/messages.h"

// The section of `__shared__` variables; the linker names its ends.
extern "C" {
[[gnu::visibility("hidden"), gnu::weak]] extern unsigned char __start_strata_shared[];
[[gnu::visibility("hidden"), gnu::weak]] extern unsigned char __stop_strata_shared[];
}

uint3 threadIdx = {};
uint3 blockIdx = {};
dim3 blockDim;
dim3 gridDim;

namespace emulate {
namespace {

constexpr unsigned char kPoison = 0xff;
constexpr unsigned char kCanary = 0xa5;
constexpr size_t kCanaryBytes = 1024;

std::atomic<uint64_t> order{0};
std::atomic<int64_t> num_launches{0};
std::mutex launching;

unsigned char* SharedMemory() {
  static unsigned char* memory = [] {
    void* bytes = std::aligned_alloc(128, kMostSharedBytes + kCanaryBytes);
    if (bytes == nullptr) std::abort();
    return static_cast<unsigned char*>(bytes);
  }();
  return memory;
}

// As a device starts: rounding to nearest, subnormals kept.
class DeviceFloats {
 public:
#if defined(__x86_64__)
  DeviceFloats() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
  ~DeviceFloats() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#else
  DeviceFloats() : saved_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
  ~DeviceFloats() { __builtin_aarch64_set_fpcr(saved_); }

 private:
  unsigned saved_;
#endif
};

std::string Text(dim3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string CheckShape(dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.x > kMostThreads || block.y > kMostThreads ||
      block.z > 64) {
    return "emulate: blocks of " + Text(block) + " threads, at most 1024 expected";
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535) {
    return "emulate: a grid of " + Text(grid) + " blocks, expected 1 to (2147483647, 65535, 65535)";
  }
  if (shared_bytes > MostSharedBytes()) {
    return "emulate: " + std::to_string(shared_bytes) + " bytes of shared memory, at most " +
           std::to_string(MostSharedBytes()) + " expected";
  }
  return "";
}

void PoisonShared(size_t dynamic_bytes) {
  const auto static_bytes = static_cast<size_t>(__stop_strata_shared - __start_strata_shared);
  if (static_bytes > 0) std::memset(__start_strata_shared, kPoison, static_bytes);
  std::memset(SharedMemory(), kPoison, dynamic_bytes);
}

bool CanaryLives(size_t dynamic_bytes) {
  const unsigned char* begin = SharedMemory() + dynamic_bytes;  // all bytes equal: to the next one
  return begin[0] == kCanary && std::memcmp(begin, begin + 1, kCanaryBytes - 1) == 0;
}

// The order of `count` blocks: n -> (n * step + start) mod count visits every one once where step
// and count share no factor.
struct BlockOrder {
  uint64_t count, step, start;
  uint64_t At(uint64_t n) const { return (n * step + start) % count; }
};

BlockOrder OrderOf(uint64_t count, uint64_t seed) {
  if (seed == 0) return {count, 1, 0};
  if (seed == 1) return {count, count - 1 > 0 ? count - 1 : 1, count - 1};
  uint64_t step = seed * 0x9e3779b9u % count | 1;
  while (std::gcd(step, count) != 1) ++step;
  return {count, step, seed};
}

Block& RunningBlock(const Place& place) {
  Block& block = TheBlock();
  if (block.running()) return block;
  std::fprintf(stderr, "emulate: %s, called outside a kernel\n", Text(place).c_str());
  std::abort();
}

}  // namespace

void SetOrder(uint64_t seed) { order = seed; }

int64_t NumLaunches() { return num_launches; }

void* DynamicShared() { return SharedMemory(); }

std::string RunBlocks(void (*body)(const void*), const void* context, dim3 grid, dim3 block,
                      size_t shared_bytes) {
  std::string error = CheckShape(grid, block, shared_bytes);
  if (!error.empty()) return error;
  const std::lock_guard<std::mutex> lock(launching);
  ++num_launches;
  const uint64_t seed = order;
  const DeviceFloats floats;
  gridDim = grid;
  blockDim = block;
  Block& runner = TheBlock();
  runner.Resize(block, seed);
  std::memset(SharedMemory() + shared_bytes, kCanary, kCanaryBytes);
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
  const BlockOrder blocks = OrderOf(count, seed);
  for (uint64_t n = 0; n < count; ++n) {
    const uint64_t i = blocks.At(n);
    blockIdx = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                static_cast<unsigned>(i / grid.x / grid.y)};
    PoisonShared(shared_bytes);
    error = runner.Run(body, context);
    if (!error.empty()) return error;
    if (!CanaryLives(shared_bytes)) {
      return "emulate: block " + Text(dim3(blockIdx)) + " wrote past its " +
             std::to_string(shared_bytes) + " bytes of dynamic shared memory";
    }
  }
  return "";
}

BlockVotes SyncBlock(int predicate, const Place& place) {
  return RunningBlock(place).SyncBlock(predicate, place);
}

uint64_t SyncWarp(WarpOp op, unsigned mask, uint64_t value, int other, int width,
                  const Place& place) {
  return RunningBlock(place).SyncWarp(op, mask, value, other, width, place);
}

void Yield(const Place& place) {
  RunningBlock(place).Yield();
  sched_yield();  // it may be a thread of the host that is waited for
}

void YieldIfShuffled() {
  Block& block = TheBlock();
  if (block.YieldsAtAtomics() && block.Random(2) == 0) block.Yield();
}

void Fail(const char* what, const Place& place) { RunningBlock(place).Fail(what, place); }

}  // namespace emulate
