// The specification of panel.h's operations: plain loops in the documented order.

#include <cstring>

#include "common/numerics.h"
#include "common/panel.h"

namespace strata {
namespace {

float LoadFloat(const TypeInfo& type, const uint8_t* bytes) {
  if (type.type == GgmlType::kF16) return HalfToFloat(bytes);
  if (type.type == GgmlType::kBF16) return Bf16ToFloat(bytes);
  float value;
  std::memcpy(&value, bytes, 4);
  return value;
}

void Pack(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
          int num_blocks, const Ahead&, Panel* panel) {
  const UnpackFn unpack = ScalarUnpack(type.type);
  RowSegment segment = {};
  for (int r = 0; r < kPanelRows; ++r) {
    if (r < num_rows) unpack(rows + r * row_bytes, num_blocks, &segment);
    if (r == num_rows) segment = {};  // lanes past the last row: any value does, zero is defined
    for (int i = 0; i < num_blocks * kBlock; ++i) {
      panel->codes[i / kBlock][i % kBlock / 4][r][i % 4] = segment.codes[i];
    }
    for (int b = 0; b < num_blocks; ++b) {
      panel->d[b][r] = segment.d[b];
      panel->m[b][r] = segment.m[b];
    }
    for (int g = 0; g < 2 * num_blocks; ++g) {
      panel->k[g][r] = segment.k[g];
      panel->n[g][r] = segment.n[g];
    }
  }
}

void PackFloat(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
               int num_values, const Ahead&, FloatPanel* panel) {
  for (int i = 0; i < num_values; ++i) {
    for (int r = 0; r < kPanelRows; ++r) {
      panel->w[i][r] =
          r < num_rows ? LoadFloat(type, rows + r * row_bytes + i * type.block_bytes) : 0.0f;
    }
  }
}

// The block's integer terms of one weight row: I and J of numerics.md.
void BlockIntegers(const TypeInfo& type, const Panel& panel, int b, int r, const int8_t* q,
                   const int32_t* sums, int32_t* i_out, int32_t* j_out) {
  int32_t half[2] = {0, 0};
  for (int i = 0; i < kBlock; ++i) {
    half[i / 16] += (panel.codes[b][i / 4][r][i % 4] - type.bias) * q[i];
  }
  const bool split = type.form == Form::kSplit || type.form == Form::kSplitMin;
  *i_out = 0;
  *j_out = 0;
  for (int g = 0; g < 2; ++g) {
    *i_out += (split ? static_cast<int32_t>(panel.k[2 * b + g][r]) : 1) * half[g];
    *j_out +=
        (type.form == Form::kSplitMin ? static_cast<int32_t>(panel.n[2 * b + g][r]) : 1) * sums[g];
  }
}

void Multiply(const TypeInfo& type, const Panel& panel, int num_blocks, const Activations& x,
              int64_t block, int64_t num_rows, const PanelOutput& out) {
  const bool has_min = type.form == Form::kMin || type.form == Form::kSplitMin;
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t row = x.rows ? x.rows[t] : t;
    const int8_t* q = x.codes + row * x.width + block * kBlock;
    const float* scales = x.scales + row * (x.width / kBlock) + block;
    const int32_t* sums = x.sums + row * (x.width / 16) + 2 * block;
    float* y = out.y + t * out.stride;
    for (int r = 0; r < out.num_columns; ++r) {
      float acc = 0.0f;
      for (int b = 0; b < num_blocks; ++b) {
        int32_t i, j;
        BlockIntegers(type, panel, b, r, q + b * kBlock, sums + 2 * b, &i, &j);
        acc = std::fma(static_cast<float>(i), panel.d[b][r] * scales[b], acc);
        if (has_min) acc = std::fma(static_cast<float>(j), panel.m[b][r] * scales[b], acc);
      }
      y[r] = (out.first ? 0.0f : y[r]) + acc;
    }
  }
}

void MultiplyFloat(const FloatPanel& panel, int num_values, const Activations& x,
                   int64_t first_value, int64_t num_rows, const PanelOutput& out) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* v = x.values + (x.rows ? x.rows[t] : t) * x.width + first_value;
    float* y = out.y + t * out.stride;
    for (int r = 0; r < out.num_columns; ++r) {
      float acc = 0.0f;
      for (int begin = 0; begin < num_values; begin += kBlock) {
        const int end = begin + kBlock < num_values ? begin + kBlock : num_values;
        float p = 0.0f;
        for (int i = begin; i < end; ++i) p = std::fma(panel.w[i][r], v[i], p);
        acc = acc + p;
      }
      y[r] = (out.first ? 0.0f : y[r]) + acc;
    }
  }
}

void Quantize(const float* x, int64_t width, int8_t* codes, float* scales, int32_t* sums) {
  for (int64_t b = 0; b < width / kBlock; ++b) {
    int8_t* q = codes + b * kBlock;
    QuantizeBlock(x + b * kBlock, q, scales + b);
    sums[2 * b] = 0;
    sums[2 * b + 1] = 0;
    for (int i = 0; i < kBlock; ++i) sums[2 * b + i / 16] += q[i];
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t count, float* h) {
  for (int64_t i = 0; i < count; ++i) h[i] = SiluMul(gate[i], up[i]);
}

void Accumulate(float weight, const float* row, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = std::fma(weight, row[i], y[i]);
}

}  // namespace

const Kernels& ScalarKernels() {
  static constexpr Kernels kKernels = {"scalar", Pack,       PackFloat,  Multiply, MultiplyFloat,
                                       Quantize, SiluMulRow, Accumulate, nullptr};
  return kKernels;
}

}  // namespace strata
