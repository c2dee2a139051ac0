// qsa_select: the blocks of cells each row attends to.
//
// A row at position p sees m = p + 1 cells, nb = m div ratio of them in complete blocks. If nb is
// at most NB all complete blocks are chosen; else the NB with the largest score
//   score_b = sum over heads of max(index_q_h . index_keys_b, 0)
// ties to the lower block (model.md, section 5, and the canonical rule of design.md, contract C).
// The result is ascending and filled up with -1. Cost follows the cells a row sees, not the size of
// the cache. One path below and above the budget; rows at and past num_live get -1.
#pragma once

#include <cstdint>

namespace strata {

struct QsaSelectArgs {
  const float* index_q;     // [T, IH, IC]
  const float* index_keys;  // [M/16, IC, 16]
  int32_t* blocks;          // [T, NB]
  int64_t num_rows;         // T
  int64_t num_live;
  int64_t pos;
  int64_t index_heads;  // IH
  int64_t index_dim;    // IC
  int64_t ratio;
  int64_t num_blocks;  // NB
};

void QsaSelect(const QsaSelectArgs& args);

}  // namespace strata
