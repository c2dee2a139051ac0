// qsa_select on a GPU: the blocks of cells each row attends to.
//
// The function is that of ffi/ops/qsa_select.h: the NB complete blocks with the highest score, ties
// to the lower block, ascending, filled up with -1. Two kernels: scores, for the blocks a row sees;
// then an exact selection, one thread block for a row. A row that sees at most NB complete blocks
// needs no scores and reads none. Scores are float sums in one fixed tree, so equal on every call
// and in every window, but not the CPU's bits.
//
// Rows past those the workspace has room for are served by further pairs of launches.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

struct QsaSelectArgs {
  const float* index_q;     // [T, IH, IC]
  const float* index_keys;  // [M/16, IC, 16]
  const int32_t* pos;       // position of row 0
  const int32_t* live;
  int32_t* blocks;   // [T, NB]
  uint32_t* scores;  // [rows_at_once, M]  scratch
  int num_rows;      // T
  int rows_at_once;  // rows that `scores` has room for, at least 1
  int index_heads;   // IH
  int index_dim;     // IC
  int num_groups;    // M/16
  int ratio;
  int num_blocks;  // NB
};

// Bytes to give a window or a tile of rows.
int64_t QsaSelectWorkspace(int64_t num_rows, int64_t num_groups);

std::string QsaSelect(const QsaSelectArgs& args, cudaStream_t stream);

}  // namespace strata
