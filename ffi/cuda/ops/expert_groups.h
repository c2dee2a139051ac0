// Entries of a tile sorted by expert, on the device: lists in a fixed order, no atomics.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata::expert_tiles {

// Entries of an expert that a block takes at once, and those that a block of expert_wide_tiles.cuh
// takes: 160 is what 8,192 rows with 10 of 512 experts give one on average.
inline constexpr int kTileRows = 64;
inline constexpr int kWideRows = 160;

// Entries [first, first + count) of the order, all of one expert.
struct ExpertTile {
  int32_t expert;
  int32_t first;
  int32_t count;
};

// In the workspace. An entry is row * A + place in the row.
struct Groups {
  int32_t* order;   // [T * A]: entries, by expert, then ascending
  int32_t* starts;  // [E]: where an expert's begin
  int32_t* counts;  // [E]
  ExpertTile* tiles;
  int32_t* first_tiles;  // [E + 1]: where an expert's tiles begin; then their number
  int32_t tile_rows;     // that a tile may have, kTileRows or more
};

// Tiles of up to `tile_rows` entries there can be: each expert's last one may be nearly empty.
inline int64_t MostTiles(int64_t entries, int64_t num_experts, int64_t tile_rows = kTileRows) {
  return entries / tile_rows + (num_experts < entries ? num_experts : entries);
}

// What the entries of a tile are counted in; an expert's word tells its home (expert_word.h).
struct TileCounts {
  uint32_t* usage;  // [E]
  uint32_t* homes;  // [kEntryHomes]; null: nobody asks
  const uint64_t* experts;
  bool peer_computes;  // entries whose expert the peer has
};

// Sorts the entries of rows [0, *live) of ids [num_rows, num_active] and cuts them into tiles;
// counts them.
std::string GroupEntries(const int32_t* ids, const int32_t* live, int64_t num_rows,
                         int64_t num_active, int64_t num_experts, const Groups& to,
                         const TileCounts& counts, cudaStream_t stream);

}  // namespace strata::expert_tiles
