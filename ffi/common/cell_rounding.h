// Writing and reading cells of the KV cache on the host. `head` counts the heads of all cells.
#pragma once

#include "common/cells.h"

namespace strata {

// Rounds a head of `dim` values as the store's type says.
void StoreKey(const CellStore& cells, int64_t head, int64_t dim, const float* from);
void StoreValue(const CellStore& cells, int64_t head, int64_t dim, const float* from);

// What a stored key stands for; `dim` is a multiple of 16.
void WidenKey(const CellStore& cells, int64_t head, int64_t dim, float* to);

// Values begin..begin+count-1 of a head's; both are multiples of 16, begin of kScaleValues.
void WidenValue(const CellStore& cells, int64_t head, int64_t dim, int64_t begin, int64_t count,
                float* to);

}  // namespace strata
