// The KV cache as operands of a handler.
#pragma once

#include <cstdint>

#include "common/cells.h"
#include "common/check.h"

namespace strata {

// Whether keys, values and scales are one cache; sets `type`.
template <typename Scales>
bool IsCache(const xla::ffi::AnyBuffer& keys, const xla::ffi::AnyBuffer& values,
             const Scales& scales, CellType& type) {
  using xla::ffi::DataType;
  if (keys.dimensions().size() != 3 || keys.element_type() != values.element_type()) return false;
  const int64_t cells = keys.dimensions()[0], heads = keys.dimensions()[1];
  const int64_t dim = keys.dimensions()[2];
  if (!HasShape(values, {cells, heads, dim})) return false;
  switch (keys.element_type()) {
    case DataType::F32:
      type = CellType::kFloat32;
      return true;
    case DataType::F16:
      type = CellType::kFloat16;
      return true;
    case DataType::S8:
      type = CellType::kInt8;
      return HasShape(scales, {cells, heads, 2 * ScaleGroups(dim)});
    default:
      return false;
  }
}

}  // namespace strata
