// Where the weight matrices of a model lie: addresses into the mapped files, by role and layer.
//
// Programs name a store by its slot, a small integer that is the same in every process, and a
// matrix by role and layer. So a compiled program holds no address, and moving or retyping a matrix
// never recompiles anything. A store is filled before the first op runs and is constant afterwards.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/gguf_types.h"

namespace strata {

// `count` matrices [rows, cols] one after the other, row-major GGUF blocks. count > 1: experts.
struct Matrix {
  const uint8_t* bytes = nullptr;  // null: this layer has no such matrix
  const TypeInfo* type = nullptr;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride =
      0;  // rows from one matrix to the next; more than `rows` where gate and up are fused

  int64_t row_bytes() const { return cols / type->block_values * type->block_bytes; }
  const uint8_t* Row(int64_t index, int64_t row) const {
    return bytes + (index * stride + row) * row_bytes();
  }
};

// Where an expert's three matrices begin.
struct ExpertBytes {
  const uint8_t* gate;
  const uint8_t* up;
  const uint8_t* down;
};

class WeightStore {
 public:
  WeightStore(int64_t num_roles, int64_t num_layers)
      : num_layers_(num_layers), matrices_(num_roles * num_layers) {}

  // Returns what is wrong with the arguments, or an empty string.
  std::string Put(int64_t role, int64_t layer, const Matrix& matrix, int64_t num_bytes);

  // Null if the role or layer is out of range or holds no matrix.
  const Matrix* Get(int64_t role, int64_t layer) const;

 private:
  int64_t num_layers_;
  std::vector<Matrix> matrices_;
};

// The process-wide registry. Slots are reused lowest first; it is never destroyed.
int64_t AddStore(std::shared_ptr<WeightStore> store);
void RemoveStore(int64_t slot);
std::shared_ptr<WeightStore> FindStore(int64_t slot);  // null if the slot is free

}  // namespace strata
