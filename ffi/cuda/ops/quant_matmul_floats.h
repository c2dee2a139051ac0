// quant_matmul_tiles for matrices that are not quantised, on chips with group instructions.
//
// Bit for bit alike whatever shares the call and however many rows there are: the order of
// float_mma.cuh, in which the kernels of other chips add, too.
#pragma once

#include "cuda/ops/quant_matmul.h"

namespace strata {

// Whether the current device has them, and they are faster for the matrices of `type`: below a few
// columns reading the rows takes longest, which other kernels do as well; and weights that are to
// be split must not take too much workspace.
bool HasFloatGroups(const std::vector<const DeviceMatrix*>& matrices, GgmlType type);

// Bytes of workspace for matrices of all types, on any device.
int64_t FloatGroupsWorkspace(const std::vector<const DeviceMatrix*>& matrices);

// The products with the matrices of `type`, F32, F16 or BF16; other columns are left alone.
std::string FloatGroups(const QuantMatmulArgs& args, GgmlType type, int64_t num_columns,
                        cudaStream_t stream);

}  // namespace strata
