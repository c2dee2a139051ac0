// expert_ffn: the routed experts and the shared expert of one layer, and their weighted sum.
//
// Row t goes through the experts ids[t, :] and through the shared expert:
//   row_e = down_e (silu(gate_e x) * (up_e x)),   h is quantised again where it was computed
//   y = +0;  y = fma(weights[t, a], row, y) for a = 0..A-1;  y = fma(shared_weights[t], shared row,
//   y)
// An expert's row is a function of x[t] and the expert's bytes alone (contract T): not of the other
// rows, their grouping, the number of threads, or the tier that holds the expert. With `tiers` the
// groups of each tier go where the tier computes: the peer's and the host's workers beside this
// thread's pool, which does the primary's, the streamed share of the misses and, without host
// workers, the host's. Rows at and past num_live are zero; their ids are not read.
#pragma once

#include <cstdint>
#include <string>

#include "common/expert_panels.h"
#include "weights/expert_tiers.h"
#include "weights/weight_store.h"

namespace strata {

struct ExpertFfnArgs {
  const float* x;               // [T, D]
  const int32_t* ids;           // [T, A]  in router order
  const float* weights;         // [T, A]
  const float* shared_weights;  // [T]
  float* y;                     // [T, D]
  int64_t num_rows;             // T
  int64_t num_live;
  int64_t width;       // D
  int64_t num_active;  // A
  FfnMatrices routed;
  FfnMatrices shared;  // count 1
  int64_t layer;
  ExpertTiers* tiers;  // null: every expert is read where the file has it
};

// Returns an empty string, or why a tier did not answer; y has no meaning then.
std::string ExpertFfn(const ExpertFfnArgs& args);

}  // namespace strata
