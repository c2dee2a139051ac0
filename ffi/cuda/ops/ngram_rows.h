// ngram_rows on the device: the contract of ops/ngram_rows.h, a block for each table row.
//
// Nothing on the device can refuse a token that is no id, so a negative one counts by its bits
// modulo 2^64: it reads some row of its head, never another place.
#pragma once

#include <cstdint>
#include <string>

#include "common/gguf_types.h"
#include "cuda/launch.h"

namespace strata {

inline constexpr int kMostNgramSize = 8;
inline constexpr int kMostNgramHeads = 64;

// What a head reads: hash mod size + offset, in rows.
struct NgramHead {
  uint64_t size;
  int64_t offset;
};

struct NgramRowsArgs {
  const int32_t* tokens;  // [T, N]   newest first
  const int32_t* live;    // one number
  float* out;             // [T, W * C]
  const uint8_t* rows;    // the table's first byte, as the device sees it
  GgmlType type;
  int32_t num_cols;         // C
  int32_t row_bytes;        // at most 32 KiB
  int32_t num_rows;         // T
  int32_t ngram_size;       // N, 2 to kMostNgramSize
  int32_t num_heads;        // W, at most kMostNgramHeads
  int32_t heads_per_ngram;  // W / (N-1)
  uint64_t multipliers[kMostNgramSize];
  NgramHead heads[kMostNgramHeads];
};

std::string NgramRows(const NgramRowsArgs& args, cudaStream_t stream);

}  // namespace strata
