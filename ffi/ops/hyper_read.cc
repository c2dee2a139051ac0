#include "ops/hyper_read.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "common/products.h"
#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

struct Workspace {
  std::vector<float> normed;  // [T, J*D]
  std::vector<float> mixed;   // [T, R]        before, then after SiLU
  std::vector<float> inject;  // [T, J]
  std::vector<float> gates;   // [T, J*D]
  QuantizedRows normed_rows;
  QuantizedRows mixed_rows;
};

STRATA_CLONES void WriteAndNorm(const HyperReadArgs& a, int64_t t, float* normed) {
  const int64_t D = a.width;
  for (int64_t s = 0; s < a.num_streams; ++s) {
    float* stream = a.streams + (t * a.num_streams + s) * D;
    const float beta = a.beta[t * a.num_streams + s];
    Float16v squares = {};
    for (int64_t i = 0; i < D; i += kLanes) {
      Float16v value, y;
      Load(stream + i, value);
      Load(a.y + t * D + i, y);
      value += beta * y;
      squares += value * value;
      Store(value, stream + i);
    }
    const float scale = 1.0f / std::sqrt(SumLanes(squares) / static_cast<float>(D) + a.eps);
    for (int64_t i = 0; i < D; i += kLanes) {
      Float16v value, weight;
      Load(stream + i, value);
      Load(a.norm + s * D + i, weight);
      Store(value * scale * weight, normed + s * D + i);
    }
  }
}

void SiluInPlace(float* x, int64_t count, float divisor) {
  constexpr int64_t kAtOnce = 64;
  static constexpr auto kOnes = [] {
    std::array<float, kAtOnce> ones{};
    ones.fill(1.0f);
    return ones;
  }();
  for (int64_t i = 0; i < count; ++i) x[i] /= divisor;
  for (int64_t i = 0; i < count; i += kAtOnce) {
    ActiveKernels().silu_mul(x + i, kOnes.data(), std::min(kAtOnce, count - i), x + i);
  }
}

STRATA_CLONES void MixStreams(const HyperReadArgs& a, const float* gates, const float* normed,
                              float* x) {
  const int64_t D = a.width;
  const float share = 1.0f / static_cast<float>(a.num_streams);
  for (int64_t i = 0; i < D; i += kLanes) {
    Float16v sum = {};
    for (int64_t s = 0; s < a.num_streams; ++s) {
      Float16v gate, value;
      Load(gates + s * D + i, gate);
      Load(normed + s * D + i, value);
      Sigmoid(gate);
      sum += gate * value;
    }
    Store(sum * share, x + i);
  }
}

bool Quantised(const Matrix* matrix) {
  return matrix != nullptr && matrix->type->form != Form::kFloat;
}

}  // namespace

void HyperRead(const HyperReadArgs& a) {
  thread_local Workspace shared_work;
  Workspace& work = shared_work;  // the pool's threads must see this thread's
  ThreadPool& pool = ThreadPool::Global();
  const int64_t J = a.num_streams;
  const int64_t wide = J * a.width;
  const int64_t rank = a.down->rows;
  work.normed.resize(a.num_live * wide);
  work.gates.resize(a.num_live * wide);
  work.mixed.resize(a.num_live * rank);
  work.inject.resize(a.num_live * J);
  work.normed_rows.Reset(work.normed.data(), a.num_live, wide,
                         Quantised(a.down) || Quantised(a.inject));
  pool.Run(a.num_live, [&](int64_t t) {
    WriteAndNorm(a, t, work.normed.data() + t * wide);
    if (work.normed_rows.quantised()) work.normed_rows.QuantizeRow(t);
  });
  const Activations normed = work.normed_rows.View();
  const int64_t down_panels = NumPanels(rank);
  pool.Run(down_panels + (a.inject != nullptr ? NumPanels(J) : 0), [&](int64_t panel) {
    const int64_t first = panel * kPanelRows;
    if (panel < down_panels) {
      MultiplyPanel(*a.down, a.down->bytes, first, normed, a.num_live, work.mixed.data() + first,
                    rank);
    } else {
      const int64_t column = first - down_panels * kPanelRows;
      MultiplyPanel(*a.inject, a.inject->bytes, column, normed, a.num_live,
                    work.inject.data() + column, J);
    }
  });
  work.mixed_rows.Reset(work.mixed.data(), a.num_live, rank, Quantised(a.up));
  for (int64_t t = 0; t < a.num_live; ++t) {
    SiluInPlace(work.mixed.data() + t * rank, rank, static_cast<float>(J));
    if (work.mixed_rows.quantised()) work.mixed_rows.QuantizeRow(t);
    for (int64_t s = 0; a.inject != nullptr && s < J; ++s) {
      const float logit = work.inject[t * J + s] / static_cast<float>(J);
      a.next_beta[t * J + s] = 2.0f / (1.0f + std::exp(-logit));
    }
  }
  pool.Run(NumPanels(wide), [&](int64_t panel) {
    MultiplyPanel(*a.up, a.up->bytes, panel * kPanelRows, work.mixed_rows.View(), a.num_live,
                  work.gates.data() + panel * kPanelRows, wide);
  });
  pool.Run(a.num_live, [&](int64_t t) {
    MixStreams(a, work.gates.data() + t * wide, work.normed.data() + t * wide, a.x + t * a.width);
  });
  const int64_t dead = a.num_rows - a.num_live;
  std::memset(a.x + a.num_live * a.width, 0, dead * a.width * sizeof(float));
  const int64_t injected = a.inject != nullptr ? a.num_live : 0;
  std::memset(a.next_beta + injected * J, 0, (a.num_rows - injected) * J * sizeof(float));
}

}  // namespace strata
