// embed_rows: the token embeddings of a window or tile, read from the file's own blocks.
//
// Rows at and past num_live are zero; their ids are not read.
#pragma once

#include <cstdint>

#include "weights/weight_store.h"

namespace strata {

struct EmbedRowsArgs {
  const int32_t* ids;  // [T]
  float* out;          // [T, D]
  int64_t num_rows;    // T
  int64_t num_live;
  const Matrix* table;  // [V, D]
};

void EmbedRows(const EmbedRowsArgs& args);

}  // namespace strata
