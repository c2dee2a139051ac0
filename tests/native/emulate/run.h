// Running a kernel on the CPU: every CUDA thread is a fiber, blocks run one after another.
//
// The order in which threads and blocks run is fixed by a seed, so a result that changes with the
// seed has a race, and one that does not change is reproducible. Shared memory is NaN (0xFF bytes)
// when a block starts. What CUDA leaves undefined at a barrier or between lanes ends the launch
// with an error that names the places in the source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "emulate/vectors.h"

namespace emulate {

// What a block may ask for: on the smallest of the supported devices (sm_86, sm_89, sm_120), or
// where the capability is 9 (SetCapability).
size_t MostSharedBytes();
inline constexpr size_t kMostSharedBytes = 227 * 1024;

// Seed 0: threads and blocks in their natural order; 1: in the reverse; others: shuffled anew for
// every block, and every atomic operation may hand over to another thread.
void SetOrder(uint64_t seed);

// Launches since the process began.
int64_t NumLaunches();

// The running block's dynamic shared memory, 128-byte aligned.
void* DynamicShared();

std::string RunBlocks(void (*body)(const void*), const void* context, dim3 grid, dim3 block,
                      size_t shared_bytes);

// Calls `callable` once for every thread of the grid; returns what went wrong, or an empty string.
// One launch runs at a time. After an error the threads that waited are dropped without running
// their destructors.
template <typename Callable>
std::string Run(const Callable& callable, dim3 grid, dim3 block, size_t shared_bytes) {
  return RunBlocks([](const void* context) { (*static_cast<const Callable*>(context))(); },
                   &callable, grid, block, shared_bytes);
}

}  // namespace emulate
