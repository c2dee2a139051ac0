// The layout that products read: one segment of 16 weight rows, interleaved so that a vector lane
// is a weight row.
//
// With a lane per row a product needs no horizontal sum, and the order of every float sum is the
// documented one whatever the vector width: block after block inside a segment, segment after
// segment into the total (numerics.md, contract T). One activation row or hundreds use the same
// code.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"
#include "common/unpack.h"

namespace strata {

inline constexpr int kPanelRows = 16;

struct Panel {
  // [block][4-value group][row][value]: a 64-byte line feeds one u8 x s8 dot product instruction.
  alignas(64) uint8_t codes[kSegmentBlocks][kBlock / 4][kPanelRows][4];
  alignas(64) float d[kSegmentBlocks][kPanelRows];
  alignas(64) float m[kSegmentBlocks][kPanelRows];
  alignas(64) float k[2 * kSegmentBlocks][kPanelRows];
  alignas(64) float n[2 * kSegmentBlocks][kPanelRows];
};

// The same for weights that are not quantised: [value][row].
struct FloatPanel {
  alignas(64) float w[kSegment][kPanelRows];
};

// Rows of quantised activations. Row r of the product reads row `rows[r]` (r itself if null).
struct Activations {
  const int8_t* codes;  // [T, K]
  const float* scales;  // [T, K/32]
  const int32_t* sums;  // [T, K/16]  sum of the codes of each half block
  const float* values;  // [T, K]     only for weights that are not quantised; null otherwise
  int64_t width;        // K
  const int32_t* rows;
};

// Where the products go: 16 consecutive columns (fewer in the last panel) of each row.
struct PanelOutput {
  float* y;         // first column of the panel in row 0
  int64_t stride;   // floats between rows
  int num_columns;  // 1..16
  bool first;       // first segment of the row: the total starts at +0
};

// Memory that will be wanted next. It is asked for row by row while a panel is packed: all at once
// the requests would fill the core's queue, and packing would wait behind them.
struct Ahead {
  const uint8_t* begin;
  int64_t num_bytes;

  // The r-th of 16 parts, into the second cache.
  inline void Ask(int r) const {
    const int64_t part = (num_bytes / kPanelRows + 63) / 64 * 64;
    const int64_t end = part * (r + 1) < num_bytes ? part * (r + 1) : num_bytes;
    for (int64_t i = part * r; i < end; i += 64) __builtin_prefetch(begin + i, 0, 2);
  }
};

// One instruction set's versions. All give the same bits.
struct Kernels {
  const char* name;
  // Weight rows -> panel. `rows` is the first byte of the segment in row 0.
  void (*pack)(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
               int num_blocks, const Ahead& ahead, Panel* panel);
  void (*pack_float)(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
                     int num_values, const Ahead& ahead, FloatPanel* panel);
  // total += segment, for T activation rows; `block` is the segment's first block of 32.
  void (*multiply)(const TypeInfo& type, const Panel& panel, int num_blocks, const Activations& x,
                   int64_t block, int64_t num_rows, const PanelOutput& out);
  void (*multiply_float)(const FloatPanel& panel, int num_values, const Activations& x,
                         int64_t first_value, int64_t num_rows, const PanelOutput& out);
  // One row of `width` values (a multiple of 32): codes, scales, half-block sums.
  void (*quantize)(const float* x, int64_t width, int8_t* codes, float* scales, int32_t* sums);
  // h[i] = silu(gate[i]) * up[i].
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* h);
  // y[i] = fma(weight, row[i], y[i]).
  void (*accumulate)(float weight, const float* row, int64_t count, float* y);
  // `pack` and `multiply` in one for a single activation row and types of Form::kPlain, without a
  // panel; null where that gains nothing.
  void (*multiply_one)(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
                       int num_blocks, const Ahead& ahead, const Activations& x, int64_t block,
                       const PanelOutput& out);
};

const Kernels& ScalarKernels();
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();

// The best set this CPU runs, or the one chosen by SelectKernels.
const Kernels& ActiveKernels();

// "auto", "scalar", "avx2" or "avx512". Returns false if this CPU or this build cannot run it.
// For tests and the doctor: results do not depend on it.
bool SelectKernels(const char* name);

// Whether this build and CPU can run the set of that name.
bool CpuRuns(const char* name);

}  // namespace strata
