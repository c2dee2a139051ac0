#include "weights/weight_store.h"

#include "common/slots.h"

namespace strata {
namespace {

// Bytes from the first row to the last; -1 where they do not fit in 63 bits.
int64_t Span(const Matrix& matrix) {
  int64_t rows, row_bytes, bytes;
  const bool too_large = __builtin_mul_overflow(matrix.count - 1, matrix.stride, &rows) ||
                         __builtin_add_overflow(rows, matrix.rows, &rows) ||
                         __builtin_mul_overflow(matrix.cols / matrix.type->block_values,
                                                matrix.type->block_bytes, &row_bytes) ||
                         __builtin_mul_overflow(rows, row_bytes, &bytes);
  return too_large ? -1 : bytes;
}

}  // namespace

std::string WeightStore::Put(int64_t role, int64_t layer, const Matrix& matrix, int64_t num_bytes) {
  const int64_t num_roles = static_cast<int64_t>(matrices_.size()) / num_layers_;
  if (role < 0 || role >= num_roles || layer < 0 || layer >= num_layers_) {
    return "role " + std::to_string(role) + ", layer " + std::to_string(layer) + " outside [0, " +
           std::to_string(num_roles) + ") x [0, " + std::to_string(num_layers_) + ")";
  }
  if (matrix.count < 1 || matrix.rows < 1 || matrix.cols < 1 ||
      matrix.cols % matrix.type->block_values != 0) {
    return "a matrix of " + std::to_string(matrix.count) + " x " + std::to_string(matrix.rows) +
           " x " + std::to_string(matrix.cols) + ", expected whole blocks of " +
           std::to_string(matrix.type->block_values) + " values";
  }
  if (matrix.stride < matrix.rows) {
    return "a stride of " + std::to_string(matrix.stride) + " rows, expected at least " +
           std::to_string(matrix.rows);
  }
  const int64_t expected = Span(matrix);
  if (expected < 0 || num_bytes != expected) {
    return std::to_string(num_bytes) + " bytes, expected " +
           (expected < 0 ? "less than 2^63" : std::to_string(expected));
  }
  matrices_[role * num_layers_ + layer] = matrix;
  return "";
}

const Matrix* WeightStore::Get(int64_t role, int64_t layer) const {
  if (layer < 0 || layer >= num_layers_ || role < 0 ||
      role * num_layers_ >= static_cast<int64_t>(matrices_.size())) {
    return nullptr;
  }
  const Matrix& matrix = matrices_[role * num_layers_ + layer];
  return matrix.bytes == nullptr ? nullptr : &matrix;
}

int64_t AddStore(std::shared_ptr<WeightStore> store) {
  return Slots<WeightStore>::Global().Add(std::move(store));
}

void RemoveStore(int64_t slot) { Slots<WeightStore>::Global().Remove(slot); }

std::shared_ptr<WeightStore> FindStore(int64_t slot) {
  return Slots<WeightStore>::Global().Find(slot);
}

}  // namespace strata
