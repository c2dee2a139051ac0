// qsa_append on a GPU: norm and rotate a window's queries and keys, write its cells of the KV
// cache.
//
// The function is that of ffi/ops/qsa_append.h. One kernel, a warp for every head of every row.
// Sums of a head run in one fixed tree, so a row's bits know nothing of the other rows.
#pragma once

#include <cstdint>
#include <string>

#include "common/cells.h"
#include "cuda/launch.h"

namespace strata {

struct QsaAppendArgs {
  const float* proj;    // [T, H*2*C | K*C | K*C | IH*IC | IC]: q with gate per head, k, v, iq, ik
  const float* q_norm;  // [C]
  const float* k_norm;  // [C]
  const float* index_q_norm;  // [IC]
  const float* index_k_norm;  // [IC]
  const float* inv_freq;      // [R/2]
  const int32_t* origin;      // position of cell 0
  const int32_t* pos;         // cell of row 0
  const int32_t* live;
  CellStore cells;    // [S, K, C]       in place
  float* index_raw;   // [S, IC]         in place
  float* index_keys;  // [M/16, IC, 16]  in place
  float* q;           // [T, H, C]
  float* index_q;     // [T, IH, IC]
  int num_rows;       // T
  int num_cells;      // S
  int num_heads;      // H
  int num_kv_heads;   // K
  int head_dim;       // C
  int index_heads;    // IH; 0: dense attention, no indexer
  int index_dim;      // IC
  int ratio;
  int rotated;  // R
  float eps;
};

std::string QsaAppend(const QsaAppendArgs& args, cudaStream_t stream);

}  // namespace strata
