// Residual streams: adds beta * y, then reads the next block's input (model.md, section 2).
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct HyperReadArgs {
  const float* streams;  // [T, J, D]
  float* new_streams;    // may be `streams`
  const float* y;        // [T, D]
  const float* beta;     // [T, J]
  const float* norm;     // [J, D]
  const int32_t* live;
  float* x;          // [T, D]
  float* next_beta;  // [T, J]
  float* workspace;  // [HyperReadWorkspace floats]
  int64_t num_rows;
  int64_t num_streams;
  int64_t width;  // D, a multiple of 32
  float eps;
  const DeviceMatrix* down;
  const DeviceMatrix* inject;  // or null
  const DeviceMatrix* up;
};

int64_t HyperReadWorkspace(int64_t num_rows, int64_t num_streams, int64_t width, int64_t rank);

std::string HyperRead(const HyperReadArgs& args, cudaStream_t stream);

}  // namespace strata
