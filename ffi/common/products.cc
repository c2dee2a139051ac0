#include "common/products.h"

#include <algorithm>

namespace strata {
void QuantizedRows::Reset(const float* values, int64_t num_rows, int64_t width, bool quantised) {
  values_ = values;
  width_ = width;
  quantised_ = quantised;
  if (!quantised) return;
  const size_t rows = static_cast<size_t>(num_rows);
  if (codes_.size() < rows * width) codes_.resize(rows * width);
  if (scales_.size() < rows * (width / kBlock)) scales_.resize(rows * (width / kBlock));
  if (sums_.size() < rows * (width / 16)) sums_.resize(rows * (width / 16));
}

void QuantizedRows::QuantizeRow(int64_t row) {
  ActiveKernels().quantize(values_ + row * width_, width_, codes_.data() + row * width_,
                           scales_.data() + row * (width_ / kBlock),
                           sums_.data() + row * (width_ / 16));
}

Activations QuantizedRows::View(const int32_t* rows) const {
  return {codes_.data(), scales_.data(), sums_.data(), values_, width_, rows};
}

void MultiplyPanel(const Matrix& shape, const uint8_t* bytes, int64_t first_row,
                   const Activations& x, int64_t num_rows, float* y, int64_t stride) {
  const Kernels& kernels = ActiveKernels();
  const TypeInfo& type = *shape.type;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelRows, shape.rows - first_row));
  const int64_t row_bytes = shape.row_bytes();
  const uint8_t* rows = bytes + first_row * row_bytes;
  const uint8_t* matrix_end = bytes + shape.rows * row_bytes;
  const int64_t panel_bytes = columns * row_bytes;
  for (int64_t begin = 0; begin < shape.cols; begin += kSegment) {
    const int values = static_cast<int>(std::min<int64_t>(kSegment, shape.cols - begin));
    const uint8_t* segment = rows + begin / type.block_values * type.block_bytes;
    const PanelOutput out = {y, stride, columns, begin == 0};
    // The panel after this one lies right behind it and is mostly the next this thread takes. Its
    // bytes are asked for in order while this one is computed: memory is read in one long run,
    // though the rows of a panel are used side by side.
    const uint8_t* next = rows + panel_bytes + panel_bytes * begin / shape.cols;
    const Ahead ahead = {
        next, std::clamp<int64_t>(matrix_end - next, 0, panel_bytes * values / shape.cols)};
    if (type.form == Form::kFloat) {
      FloatPanel panel;
      kernels.pack_float(type, segment, row_bytes, columns, values, ahead, &panel);
      kernels.multiply_float(panel, values, x, begin, num_rows, out);
    } else if (num_rows == 1 && type.form == Form::kPlain && kernels.multiply_one != nullptr) {
      kernels.multiply_one(type, segment, row_bytes, columns, values / kBlock, ahead, x,
                           begin / kBlock, out);
    } else {
      Panel panel;
      kernels.pack(type, segment, row_bytes, columns, values / kBlock, ahead, &panel);
      kernels.multiply(type, panel, values / kBlock, x, begin / kBlock, num_rows, out);
    }
  }
}

}  // namespace strata
