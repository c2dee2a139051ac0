// Activation rows of a tile, quantised once for all products with them (contract T).
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

// Calls with more rows are a prompt's tiles: matrix units serve them.
inline constexpr int64_t kMostWindowRows = 64;

}  // namespace strata

namespace strata::tiles {

inline constexpr int kRowsPadding = 128;    // rows of memory behind the last, read and not used
inline constexpr int kValuesPadding = 128;  // values: zeros behind a row's end

constexpr int64_t RoundUp(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Rows in memory; `values` is the padded number of a row's values.
struct QuantizedRows {
  int8_t* codes;  // [rows, values]
  float* scales;  // [rows, values / 32]
  float* sums;    // [rows, values / 16]: of 16 codes each, for types with minimums
  int64_t values;

  static constexpr int64_t Values(int64_t width) { return RoundUp(width, kValuesPadding); }
  static constexpr int64_t Bytes(int64_t rows, int64_t width) {
    return RoundUp(rows, kRowsPadding) * Values(width) * 11 / 8;
  }
  // The rows in `Bytes` bytes at `at`, 16-byte aligned.
  static QuantizedRows At(unsigned char* at, int64_t rows, int64_t width);
};

// Quantises rows [0, *live) of x [num_rows, width]. What lies behind them is undefined.
std::string QuantizeTileRows(const float* x, const int32_t* live, int64_t num_rows, int64_t width,
                             const QuantizedRows& to, cudaStream_t stream);

}  // namespace strata::tiles
