// route on the device: the products of a layer's router (quant_matmul's bits) and the choice of
// experts after them (router_topk's), in one kernel where that is possible.
//
// Windows with a router that is not quantised: every block computes some logits of all rows and
// leaves them in the workspace; the block that arrives last has all of them and orders each row by
// a warp. Everything else is the two ops' kernels one after the other.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct RouteArgs {
  const float* x;                     // [T, K]
  const int32_t* live;                // one number
  int32_t* ids;                       // [T, A]
  float* weights;                     // [T, A]
  float* shared;                      // [T]
  float* workspace;                   // [RouteWorkspace]
  int64_t num_rows;                   // T
  int64_t width;                      // K, a multiple of 32
  int64_t num_active;                 // A, at most E
  const DeviceMatrix* router;         // [E, K]
  const DeviceMatrix* shared_router;  // [1, K]
};

// Floats.
int64_t RouteWorkspace(int64_t num_rows, const DeviceMatrix& router,
                       const DeviceMatrix& shared_router);

std::string Route(const RouteArgs& args, cudaStream_t stream);

}  // namespace strata
