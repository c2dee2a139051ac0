// router_topk on the device: the contract of ops/router_topk.h, a warp for each row.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

struct RouterTopkArgs {
  const float* logits;  // [T, E + 1]
  const int32_t* live;  // one number
  int32_t* ids;         // [T, A]
  float* weights;       // [T, A]
  float* shared;        // [T]
  int64_t num_rows;     // T
  int64_t num_experts;  // E, at most kMostExperts
  int64_t num_active;   // A, at most E
};

inline constexpr int64_t kMostExperts = 4096;

std::string RouterTopk(const RouterTopkArgs& args, cudaStream_t stream);

}  // namespace strata
