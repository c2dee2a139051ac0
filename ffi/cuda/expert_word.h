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
  kLocal = 0,  // the primary's kernels
  kPeer = 1,   // the peer's kernels
  kHost = 2,   // threads of the host, in windows
};

inline constexpr uint64_t kLinked = 4;  // the panels lie in the host's memory: for counting only
// The expert stays in the file: its panels are there while a tile goes through its layer, and never
// for windows, where the host computes it (file_stage.h). Not beside kLinked.
inline constexpr uint64_t kFromFile = 8;
inline constexpr uint64_t kTagMask = 3;
inline constexpr uint64_t kTagBits = 255;        // the tag and kLinked, and room
inline constexpr int64_t kMostDoorEntries = 32;  // of a row, where tags differ: a lane each

// Where entries were computed, as a device counts them.
enum EntryHome {
  kOnPrimary = 0,
  kOnPeer = 1,
  kOverLink = 2,
  kOnHost = 3,
  kOfFile = 4,
  kReadByTiles = 5,    // experts, not entries: so often tiles' kernels read one over the link, each
                       // read for as many entries as the kernels take at once
  kTilesOverLink = 6,  // entries of tiles whose expert the host has
  kEntryHomes = 7,
};

inline uint64_t ExpertWord(const uint8_t* panels, ExpertTag tag, bool linked) {
  return reinterpret_cast<uint64_t>(panels) | static_cast<uint64_t>(tag) | (linked ? kLinked : 0);
}

// Words of a layer as somebody wishes them to be, and as kernels read them.
struct Latch {
  const uint64_t* wanted = nullptr;  // null: words stand still
  uint64_t* words = nullptr;
  int32_t count = 0;
};

}  // namespace strata
