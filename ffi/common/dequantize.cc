#include "common/dequantize.h"

#include <algorithm>

#include "common/numerics.h"
#include "common/unpack.h"

namespace strata {
namespace {

void FloatRow(const Matrix& matrix, const uint8_t* bytes, float* out) {
  for (int64_t i = 0; i < matrix.cols; ++i, bytes += matrix.type->block_bytes) {
    switch (matrix.type->type) {
      case GgmlType::kF16:
        out[i] = HalfToFloat(bytes);
        break;
      case GgmlType::kBF16:
        out[i] = Bf16ToFloat(bytes);
        break;
      default:
        std::memcpy(out + i, bytes, 4);
    }
  }
}

}  // namespace

void DequantizeRow(const Matrix& matrix, int64_t row, float* out) {
  const TypeInfo& type = *matrix.type;
  const uint8_t* bytes = matrix.Row(0, row);
  if (type.form == Form::kFloat) return FloatRow(matrix, bytes, out);
  const UnpackFn unpack = ScalarUnpack(type.type);
  const bool split = type.form == Form::kSplit || type.form == Form::kSplitMin;
  RowSegment segment;
  for (int64_t begin = 0; begin < matrix.cols; begin += kSegment) {
    const int count = static_cast<int>(std::min<int64_t>(kSegment, matrix.cols - begin));
    unpack(bytes + begin / type.block_values * type.block_bytes, count / kBlock, &segment);
    for (int i = 0; i < count; ++i) {
      const float w = static_cast<float>(static_cast<int>(segment.codes[i]) - type.bias);
      float value = segment.d[i / kBlock] * (split ? segment.k[i / 16] * w : w);
      if (type.form == Form::kMin) value += segment.m[i / kBlock];
      if (type.form == Form::kSplitMin) value += segment.m[i / kBlock] * segment.n[i / 16];
      out[begin + i] = value;
    }
  }
}

}  // namespace strata
