// ngram_rows on the device: the contract of ops/ngram_rows.h, a block for each table row.
//
// Where the host reads the table, ngram_ask of the same step has asked for the rows, and the blocks
// wait for the answer (table_mailbox.h). A row that the host could not read is NaN throughout, as
// are all rows of a step that was given up.
#pragma once

#include <cstdint>
#include <string>

#include "common/gguf_types.h"
#include "cuda/launch.h"
#include "cuda/ops/ngram_hash.h"
#include "cuda/table_mailbox.h"

namespace strata {

struct NgramRowsArgs {
  const int32_t* tokens;  // [T, N]   newest first
  const int32_t* live;    // one number
  float* out;             // [T, W * C]
  const uint8_t* rows;    // the table's first byte, as the device sees it; null: the host reads
  GgmlType type;
  int32_t num_cols;   // C
  int32_t row_bytes;  // at most 32 KiB
  int32_t num_rows;   // T
  TableMailboxAt mailbox;
  NgramHash hash;
};

std::string NgramRows(const NgramRowsArgs& args, cudaStream_t stream);

}  // namespace strata
