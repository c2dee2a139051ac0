// qsa_attend on a GPU: attention of each row over its selected blocks and the tail, gated.
//
// The function is that of ffi/ops/qsa_attend.h. The row's list of cells, blocks ascending and then
// the tail, is cut into tiles of kAttendTile cells; tile i belongs to slot i mod kAttendSlots. One
// thread block works on a slot for one key head and up to 12 of its query heads, so that keys and
// values are read once for all of them, and leaves a maximum, a sum of weights and a weighted sum
// of values. A second kernel adds the slots up in ascending order and applies the gate. The order
// of all sums follows from the list alone: not from the window, nor from the size of the cache.
//
// Two kernels, where the last thread block to arrive could add up: a row's partial sums are 1.6 MB,
// which one thread block would read for longer than a launch takes, and its counter would have to
// be right again after a step that was aborted.
//
// Rows past those the workspace has room for are served by further pairs of launches.
#pragma once

#include <cstdint>
#include <string>

#include "common/cells.h"
#include "cuda/launch.h"

namespace strata {

inline constexpr int kAttendTile = 32;    // cells
inline constexpr int kAttendSlots = 128;  // of a row, at most
inline constexpr int kMostAttendDim = 256;

struct QsaAttendArgs {
  const float* q;         // [T, H, C]
  const float* proj;      // [T, proj_stride]  head h's gate lies at (2 h + 1) C
  CellStore cells;        // [S, K, C]      read only
  const int32_t* blocks;  // [T, NB]
  const int32_t* pos;     // position of row 0
  const int32_t* live;
  float* out;           // [T, H*C]
  float* workspace;     // [rows_at_once * QsaAttendRowFloats]
  int num_rows;         // T
  int rows_at_once;     // rows that the workspace has room for, at least 1
  int num_cells;        // S
  int64_t proj_stride;  // a multiple of 4
  int num_heads;        // H
  int num_kv_heads;     // K
  int head_dim;         // C, a multiple of 16 up to kMostAttendDim
  int ratio;            // 0: dense attention
  int num_blocks;       // NB
};

// What one row needs of the workspace.
int64_t QsaAttendRowFloats(int64_t num_heads, int64_t head_dim, int64_t num_cells,
                           int64_t num_blocks, int64_t ratio);

// Bytes to give a window or a tile of rows.
int64_t QsaAttendWorkspace(int64_t num_rows, int64_t num_heads, int64_t head_dim, int64_t num_cells,
                           int64_t num_blocks, int64_t ratio);

std::string QsaAttend(const QsaAttendArgs& args, cudaStream_t stream);

}  // namespace strata
