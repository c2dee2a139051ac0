// One expert's product with some rows, panel by panel: what the CPU's expert_ffn and the host's
// workers beside a GPU share.
#pragma once

#include <cstdint>
#include <vector>

#include "common/products.h"
#include "weights/weight_store.h"

namespace strata {

struct FfnMatrices {
  const Matrix* gate;  // [count, F, D]
  const Matrix* up;    // [count, F, D]
  const Matrix* down;  // [count, D, F]
};

// Rows that share one set of matrices: entries [begin, end) of a call's order.
struct FfnGroup {
  const FfnMatrices* matrices;
  ExpertBytes bytes;
  int64_t begin;
  int64_t end;
};

// A call's rows on their way through the experts.
struct FfnRows {
  std::vector<int32_t> token_of;  // [entries] which row of the inputs
  std::vector<float> hidden;      // [entries, hidden_width]
  QuantizedRows inputs;
  QuantizedRows hidden_rows;
  int64_t hidden_width;
};

// 16 hidden values of each of the group's entries: silu(gate x) * (up x), before they are
// quantised.
void GateUpPanel(const FfnGroup& group, int64_t panel, FfnRows& rows);

// 16 values of each of the group's rows, `stride` floats from one to the next; `identity` counts
// from 0 on, for as many as there are entries.
void DownPanel(const FfnGroup& group, int64_t panel, const FfnRows& rows, const int32_t* identity,
               float* y, int64_t stride);

}  // namespace strata
