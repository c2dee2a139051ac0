// The word of one (layer, expert): where its panels lie, and whose kernels or threads compute it.
//
// Kernels read it from a table in device memory at run time. A panel's address is a multiple of
// 256, so the lowest bits hold the tag. The address serves whoever computes by it: with kLocal it
// is a slot of this device or page-locked memory of the host, with kHost page-locked memory that
// tiles and the streamed share of a window's misses read over the link, or null.
#pragma once

#include <cstdint>

namespace strata {

enum class ExpertTag : uint32_t {
  kLocal = 0,    // this device's kernels
  kPeer = 1,     // the peer's kernels
  kHost = 2,     // threads of the host, in windows
  kNotMine = 3,  // in the peer's table: none of the peer's business
};

inline constexpr uint64_t kTagBits = 255;
inline constexpr int64_t kMostDoorEntries = 32;  // of a row, where tags differ: a lane each

inline uint64_t ExpertWord(const uint8_t* panels, ExpertTag tag) {
  return reinterpret_cast<uint64_t>(panels) | static_cast<uint64_t>(tag);
}

}  // namespace strata
