// Products of quantised activations with rows of a matrix, panel by panel: what quant_matmul and
// expert_ffn share.
#pragma once

#include <cstdint>
#include <vector>

#include "common/panel.h"
#include "weights/weight_store.h"

namespace strata {

// Rows of activations in both forms a matrix may ask for. Buffers grow and are kept.
class QuantizedRows {
 public:
  // Makes room for num_rows x width; the float form reads `values` in place.
  void Reset(const float* values, int64_t num_rows, int64_t width, bool quantised);
  // Quantises one row; rows may be done on different threads.
  void QuantizeRow(int64_t row);
  Activations View(const int32_t* rows = nullptr) const;
  int64_t width() const { return width_; }
  bool quantised() const { return quantised_; }

 private:
  const float* values_ = nullptr;
  int64_t width_ = 0;
  bool quantised_ = false;
  std::vector<int8_t> codes_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
};

inline int64_t NumPanels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// y[t, 0..15] = x[row t] . W[first_row .. first_row + 15], for t < num_rows; fewer columns at the
// end of the matrix. `bytes` is where one matrix of that shape and type begins: in the file or in a
// tier's slot.
void MultiplyPanel(const Matrix& shape, const uint8_t* bytes, int64_t first_row,
                   const Activations& x, int64_t num_rows, float* y, int64_t stride);

}  // namespace strata
