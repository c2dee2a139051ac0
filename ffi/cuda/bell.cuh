// The device's side of a bell (bell.h).
#pragma once

#include "cuda/bell.h"
#include "cuda/launch.h"
#include "cuda/system_scope.cuh"

namespace strata {

// Waits, one thread of a kernel, for the answer that was asked for; gives up where the host shows
// no sign of life for too long. Whether an answer is there.
__device__ inline bool AwaitAnswer(Bell* bell, BellState* state) {
  constexpr int kLooks = 64;  // between two at the beat: each is a way over the link
  const auto* failed = static_cast<const volatile uint32_t*>(&state->failed);
  const uint64_t epoch = *static_cast<const volatile uint64_t*>(&state->awaited);
  if (epoch == 0) return false;
  const uint32_t limit_ms = *static_cast<const volatile uint32_t*>(&bell->timeout_ms);
  uint64_t beat = 0, since = NowNs();
  for (int look = 1; LoadAcquireSystem(&bell->done) < epoch; ++look) {
    __nanosleep(100);
    if (look % kLooks != 0) continue;
    if (*failed != 0) return false;
    const uint64_t now_beat = LoadAcquireSystem(&bell->beat);
    const uint64_t now = NowNs();
    if (now_beat != beat) {
      beat = now_beat;
      since = now;
    } else if (now - since > uint64_t{limit_ms} * 1000000u) {
      atomicExch(&state->failed, 1u);
      StoreReleaseSystem(&bell->aborted, uint32_t{1});
      return false;
    }
  }
  return true;
}

// The same for the other blocks, one thread of each, from the one that looks.
__device__ inline void AwaitNews(const BellState* state) {
  const auto* failed = static_cast<const volatile uint32_t*>(&state->failed);
  const uint64_t epoch = *static_cast<const volatile uint64_t*>(&state->awaited);
  if (epoch == 0) return;
  while (LoadAcquireSystem(&state->answered) != epoch && *failed == 0) __nanosleep(300);
}

}  // namespace strata
