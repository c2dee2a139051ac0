// ngram_rows: the hashed n-gram embedding of each row, 16 table rows side by side in the real
// model.
//
// With t_0 the row's token, t_1 the one before and so on (padded with EOS by the caller), and all
// integers modulo 2^64:  h_n = t_0 m_0 xor ... xor t_{n-1} m_{n-1}  for n = 2..N. Heads come in
// groups, one group per n; head j reads table row  h_n mod size_j + offset_j  (model.md, section
// 7). All rows are asked of the table at once, from wherever it lies, and then dequantised. Rows at
// and past num_live are zero.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "weights/ngram_table.h"

namespace strata {

struct NgramRowsArgs {
  const int32_t* tokens;  // [T, N]   newest first
  float* out;             // [T, W * C]
  int64_t num_rows;       // T
  int64_t num_live;
  std::span<const int64_t> multipliers;  // [N]
  std::span<const int64_t> offsets;      // [W]
  std::span<const int64_t> sizes;        // [W]
  NgramTable* table;                     // [R, C]
};

// Returns what went wrong when rows could not be read, or an empty string.
std::string NgramRows(const NgramRowsArgs& args);

}  // namespace strata
