// When parts of a step begin, as the device itself sees it.
//
// A mark is a kernel of one thread that writes the device's clock behind whatever the stream held
// before: it takes part in a captured graph and is written again at every replay. Only programs
// that were compiled to be timed hold marks.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/launch.h"

namespace strata {

// Parts of expert_ffn; the other numbers are the callers' (strata_jax/ops/timed.py).
enum class Phase : int32_t {
  kGroup = 0,
  kWait = 1,
  kGateUp = 2,
  kDown = 3,
  kCombine = 4,
  kPeer = 18
};

// Of a peer's own timeline.
enum class PeerPhase : int32_t {
  kIdle = 0,
  kRowsIn = 1,
  kWait = 2,
  kGateUp = 3,
  kDown = 4,
  kAttentionIn = 5,
  kSelect = 6,
  kAttend = 7
};

struct MarkEntry {
  uint64_t at_ns;
  uint64_t phase;
};

// What kernels are told.
struct TimelineAt {
  MarkEntry* marks = nullptr;  // null: nothing is timed
  uint32_t* count = nullptr;
  uint32_t capacity = 0;
};

// What the stream gets from here on is of that phase. Nothing without a timeline.
std::string Mark(const TimelineAt& timeline, int64_t phase, cudaStream_t stream);
inline std::string Mark(const TimelineAt& timeline, Phase phase, cudaStream_t stream) {
  return Mark(timeline, static_cast<int64_t>(phase), stream);
}

class Timeline {
 public:
  // Room for so many marks on the current device. Throws std::runtime_error.
  explicit Timeline(int64_t capacity);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  TimelineAt at() const { return at_; }
  // (nanoseconds, phase) of all marks since the last time, in order. Waits for the device.
  std::vector<std::pair<uint64_t, uint64_t>> Take();

 private:
  TimelineAt at_;
};

}  // namespace strata
