// Activations times matrices, side by side: y[t] = (W_0 x_t | W_1 x_t | ...), by contract T.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct QuantMatmulArgs {
  const float* x;       // [T, K]
  const int32_t* live;  // rows past it become zeros
  float* y;             // [T, N]
  float* workspace;     // [WorkspaceFloats]
  int64_t num_rows;
  int64_t width;  // K, a multiple of 32
  std::vector<const DeviceMatrix*> matrices;
};

inline constexpr int kMostMatrices = 6;

// Floats of workspace, at least one: XLA gives no empty results.
int64_t QuantMatmulWorkspace(int64_t num_rows, const std::vector<const DeviceMatrix*>& matrices);

std::string QuantMatmul(const QuantMatmulArgs& args, cudaStream_t stream);

}  // namespace strata
