// qsa_append: norm and rotate a window's queries and keys, and write its cells of the KV cache.
//
// Per live row of cell p = pos + t: q and k are normalised per head (x / sqrt(mean x^2 + eps) *
// weight) and rotated in their first R values (NEOX halves, angle (origin + p) * theta^(-2j/R)); k
// and v go to cell p. The indexer's query heads are treated the same way; its key is kept raw in
// cell p of index_raw, and whenever a block of `ratio` cells is complete, the mean of its raw keys
// is normalised, rotated at the position of the block's first token and kept in index_keys
// (model.md, sections 4 and 5).
//
// index_keys holds 16 blocks side by side, [M/16, C, 16], so that scoring has a lane per block.
// Rows at and past num_live write no cell and give zeros. A row's bits depend on that row, its
// position and, for a block, on the block's raw keys.
#pragma once

#include <cstdint>

#include "common/cells.h"

namespace strata {

struct QsaAppendArgs {
  const float* proj;    // [T, H*2*C | K*C | K*C | IH*IC | IC]: q with gate per head, k, v, iq, ik
  const float* q_norm;  // [C]
  const float* k_norm;  // [C]
  const float* index_q_norm;  // [IC]
  const float* index_k_norm;  // [IC]
  const float* inv_freq;      // [R/2]
  CellStore cells;            // [S, K, C]       in place
  float* index_raw;           // [S, IC]         in place
  float* index_keys;          // [M/16, IC, 16]  in place
  float* q;                   // [T, H, C]
  float* index_q;             // [T, IH, IC]
  int64_t num_rows;           // T
  int64_t num_live;
  int64_t origin;        // position of cell 0: not 0 in a cache that dropped its oldest blocks
  int64_t pos;           // cell of row 0
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // K
  int64_t head_dim;      // C
  int64_t index_heads;   // IH; 0: dense attention, no indexer
  int64_t index_dim;     // IC
  int64_t ratio;
  int64_t rotated;  // R
  float eps;
};

void QsaAppend(const QsaAppendArgs& args);

}  // namespace strata
