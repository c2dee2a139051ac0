// Routed experts and the shared one: y = sum of weight * down(silu(gate x) * up x), contract T.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct ExpertFfnArgs {
  const float* x;               // [T, D]
  const int32_t* ids;           // [T, A]
  const float* weights;         // [T, A]
  const float* shared_weights;  // [T]
  const int32_t* live;
  float* y;                  // [T, D]
  unsigned char* workspace;  // [ExpertFfnWorkspace bytes], 16-byte aligned
  int64_t num_rows;
  int64_t num_active;
  int64_t width;
  const ExpertShape* routed;
  const uint8_t* const* experts;  // device, [E]: where each lies
  uint32_t* usage;                // device, [E]
  const DeviceMatrix* shared_gate;
  const DeviceMatrix* shared_up;
  const DeviceMatrix* shared_down;
};

int64_t ExpertFfnWorkspace(int64_t num_rows, int64_t num_active, int64_t hidden);

std::string ExpertFfn(const ExpertFfnArgs& args, cudaStream_t stream);

}  // namespace strata
