// What threads of a block do together: barriers, shuffles, votes. Every call remembers its place in
// the source for messages.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulate {

struct Place {
  const char* file;
  const char* function;
  int line;
  // Used as a default argument, it is the place of the call.
  Place(const char* f = __builtin_FILE(), const char* g = __builtin_FUNCTION(),
        int l = __builtin_LINE())
      : file(f), function(g), line(l) {}
};

enum class WarpOp : uint8_t {
  kSync,
  kShuffle,
  kUp,
  kDown,
  kXor,
  kBallot,
  kAny,
  kAll,
  kMatch,
  kAdd,
  kMin,
  kMax,
  kUMin,
  kUMax,
  kAnd,
  kOr,
  kXorAll
};

struct BlockVotes {
  int count;  // threads with a true predicate
  int threads;
};

// Waits for the block's threads that have not ended.
BlockVotes SyncBlock(int predicate, const Place& place);

// Waits for the lanes of `mask` that have not ended. `value` is this lane's, `other` and `width`
// are a shuffle's; returns the lane's result. A lane that nobody may read from gives 0xFF bytes.
uint64_t SyncWarp(WarpOp op, unsigned mask, uint64_t value, int other, int width,
                  const Place& place);

// Lets other threads run.
void Yield(const Place& place);
void YieldIfShuffled();

[[noreturn]] void Fail(const char* what, const Place& place);

template <typename T>
T Exchange(WarpOp op, unsigned mask, T value, int other, int width, const Place& place) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = SyncWarp(op, mask, bits, other, width, place);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulate

// NOLINTBEGIN: CUDA's names
inline void __syncthreads(emulate::Place place = {}) { emulate::SyncBlock(0, place); }
inline int __syncthreads_count(int predicate, emulate::Place place = {}) {
  return emulate::SyncBlock(predicate, place).count;
}
inline int __syncthreads_or(int predicate, emulate::Place place = {}) {
  return emulate::SyncBlock(predicate, place).count > 0;
}
inline int __syncthreads_and(int predicate, emulate::Place place = {}) {
  const emulate::BlockVotes votes = emulate::SyncBlock(predicate, place);
  return votes.count == votes.threads;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, emulate::Place place = {}) {
  emulate::SyncWarp(emulate::WarpOp::kSync, mask, 0, 0, 32, place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulate::Place place = {}) {
  return static_cast<unsigned>(
      emulate::SyncWarp(emulate::WarpOp::kBallot, mask, predicate != 0, 0, 32, place));
}
inline int __any_sync(unsigned mask, int predicate, emulate::Place place = {}) {
  return static_cast<int>(
      emulate::SyncWarp(emulate::WarpOp::kAny, mask, predicate != 0, 0, 32, place));
}
inline int __all_sync(unsigned mask, int predicate, emulate::Place place = {}) {
  return static_cast<int>(
      emulate::SyncWarp(emulate::WarpOp::kAll, mask, predicate != 0, 0, 32, place));
}

// The overloads CUDA has, so that arguments convert as they do there.
#define STRATA_EMULATE_SHUFFLES(T)                                                                \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32,                          \
                       emulate::Place place = {}) {                                               \
    return emulate::Exchange(emulate::WarpOp::kShuffle, mask, value, lane, width, place);         \
  }                                                                                               \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,                 \
                          emulate::Place place = {}) {                                            \
    return emulate::Exchange(emulate::WarpOp::kUp, mask, value, static_cast<int>(delta), width,   \
                             place);                                                              \
  }                                                                                               \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,               \
                            emulate::Place place = {}) {                                          \
    return emulate::Exchange(emulate::WarpOp::kDown, mask, value, static_cast<int>(delta), width, \
                             place);                                                              \
  }                                                                                               \
  inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,                 \
                           emulate::Place place = {}) {                                           \
    return emulate::Exchange(emulate::WarpOp::kXor, mask, value, lane_mask, width, place);        \
  }
STRATA_EMULATE_SHUFFLES(int)
STRATA_EMULATE_SHUFFLES(unsigned)
STRATA_EMULATE_SHUFFLES(long)
STRATA_EMULATE_SHUFFLES(unsigned long)
STRATA_EMULATE_SHUFFLES(long long)
STRATA_EMULATE_SHUFFLES(unsigned long long)
STRATA_EMULATE_SHUFFLES(float)
STRATA_EMULATE_SHUFFLES(double)
#undef STRATA_EMULATE_SHUFFLES

#define STRATA_EMULATE_MATCHES(T)                                                       \
  inline unsigned __match_any_sync(unsigned mask, T value, emulate::Place place = {}) { \
    uint64_t bits = 0;                                                                  \
    std::memcpy(&bits, &value, sizeof(T));                                              \
    return static_cast<unsigned>(                                                       \
        emulate::SyncWarp(emulate::WarpOp::kMatch, mask, bits, 0, 32, place));          \
  }
STRATA_EMULATE_MATCHES(int)
STRATA_EMULATE_MATCHES(unsigned)
STRATA_EMULATE_MATCHES(long long)
STRATA_EMULATE_MATCHES(unsigned long long)
#undef STRATA_EMULATE_MATCHES

#define STRATA_EMULATE_REDUCE(name, T, op)                                    \
  inline T name(unsigned mask, T value, emulate::Place place = {}) {          \
    return emulate::Exchange(emulate::WarpOp::op, mask, value, 0, 32, place); \
  }
STRATA_EMULATE_REDUCE(__reduce_add_sync, int, kAdd)
STRATA_EMULATE_REDUCE(__reduce_add_sync, unsigned, kAdd)
STRATA_EMULATE_REDUCE(__reduce_min_sync, int, kMin)
STRATA_EMULATE_REDUCE(__reduce_min_sync, unsigned, kUMin)
STRATA_EMULATE_REDUCE(__reduce_max_sync, int, kMax)
STRATA_EMULATE_REDUCE(__reduce_max_sync, unsigned, kUMax)
STRATA_EMULATE_REDUCE(__reduce_and_sync, unsigned, kAnd)
STRATA_EMULATE_REDUCE(__reduce_or_sync, unsigned, kOr)
STRATA_EMULATE_REDUCE(__reduce_xor_sync, unsigned, kXorAll)
#undef STRATA_EMULATE_REDUCE

// Waiting for something that another thread does, perhaps one of the host.
inline void __nanosleep(unsigned, emulate::Place place = {}) { emulate::Yield(place); }
#define __trap() emulate::Fail("__trap()", emulate::Place())
// NOLINTEND
