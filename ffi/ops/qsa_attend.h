// qsa_attend: attention of each row over its selected blocks and the tail, gated.
//
// Row t at position p attends to the cells of blocks[t] (ascending, -1 fills up) and to the (p + 1)
// mod ratio newest cells, in ascending order, all heads to the same cells; with ratio 0 to every
// cell up to p. All arithmetic, softmax too, is float32 over what the cells' stored values stand
// for; then out = sigmoid(gate) * attention. Query head h uses key
// head h div (H/K) (model.md, section 4). The order of sums depends on the list of cells alone.
// Rows at and past num_live are zero and read nothing.
#pragma once

#include <cstdint>

#include "common/cells.h"

namespace strata {

struct QsaAttendArgs {
  const float* q;         // [T, H, C]
  const float* proj;      // [T, stride]  head h's gate lies at (2 h + 1) C
  CellStore cells;        // [S, K, C]      read only
  const int32_t* blocks;  // [T, NB]
  float* out;             // [T, H*C]
  int64_t num_rows;       // T
  int64_t num_live;
  int64_t pos;
  int64_t proj_stride;
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // K
  int64_t head_dim;      // C, a multiple of 16
  int64_t ratio;
  int64_t num_blocks;  // NB
};

void QsaAttend(const QsaAttendArgs& args);

}  // namespace strata
