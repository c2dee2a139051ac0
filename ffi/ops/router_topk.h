// router_topk: the experts of each row and their weights.
//
// The num_active largest logits of each row, ties to the lower id, in descending order; the weights
// are their softmax among themselves, which equals softmax over all experts renormalised over the
// chosen. The column after the experts is the shared expert's gate: its weight is the sigmoid
// (model.md, section 6). Rows at and past num_live get ids 0 and weights 0.
#pragma once

#include <cstdint>

namespace strata {

struct RouterTopkArgs {
  const float* logits;  // [T, E + 1]
  int32_t* ids;         // [T, A]
  float* weights;       // [T, A]
  float* shared;        // [T]
  int64_t num_rows;     // T
  int64_t num_live;
  int64_t num_experts;  // E
  int64_t num_active;   // A
};

void RouterTopk(const RouterTopkArgs& args);

}  // namespace strata
