// Memory of the primary on its way to the peer, as much of it as a step uses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace strata {

// What a piece's length is counted in.
enum class PullCount : int32_t {
  kAll,    // once
  kRows,   // the peer's live rows
  kCells,  // cells that these see
};

// unit_bytes for every unit_rows of what is counted, begun ones whole. Up to 15 bytes behind the
// end are read and written.
struct PullPiece {
  const void* from;
  void* to;
  int64_t unit_bytes;
  int64_t unit_rows;
  PullCount count;
};

// The primary's words that say how much that is, and the peer's that say it there.
struct PullNumbers {
  const int32_t* live;  // rows of the step
  const int32_t* pos;   // of row 0; null: cells do not count
  int64_t num_rows;     // of the program
  int64_t first_row;    // the peer's
  int64_t num_cells;    // there are
  int32_t* peers_live;  // of the rows from `first_row` on
  int32_t* peers_pos;   // of the first of them; null as `pos` is
};

// Enqueues one kernel of the peer. At most kMostPulls pieces.
inline constexpr int kMostPulls = 8;
std::string Pull(const std::vector<PullPiece>& pieces, const PullNumbers& numbers,
                 cudaStream_t stream);

}  // namespace strata
