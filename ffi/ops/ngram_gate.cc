#include "ops/ngram_gate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

STRATA_INLINE float InverseRms(const float* x, int64_t count, float eps) {
  return 1.0f / std::sqrt(Dot(x, x, count) / static_cast<float>(count) + eps);
}

// Adds G to one row's streams and leaves the convolution's input N(G) in `inputs`.
STRATA_CLONES void GateRow(const NgramGateArgs& a, int64_t t, float* inputs) {
  const int64_t D = a.width;
  const float* keys = a.key_value + t * (a.num_streams + 1) * D;
  const float* value = keys + a.num_streams * D;
  for (int64_t s = 0; s < a.num_streams; ++s) {
    float* stream = a.streams + (t * a.num_streams + s) * D;
    const float* key = keys + s * D;
    Float16v sum = {};
    for (int64_t i = 0; i < D; i += kLanes) {
      Float16v k, x, wk, wq;
      Load(key + i, k);
      Load(stream + i, x);
      Load(a.norm_key + s * D + i, wk);
      Load(a.norm_query + s * D + i, wq);
      sum += (k * wk) * (x * wq);
    }
    float z = SumLanes(sum) * InverseRms(key, D, a.eps) * InverseRms(stream, D, a.eps) /
              std::sqrt(static_cast<float>(D));
    const float root = std::sqrt(std::max(std::fabs(z), 1e-6f));
    z = z > 0.0f ? root : (z < 0.0f ? -root : z);
    const float gate = 1.0f / (1.0f + std::exp(-z));
    float* gated = inputs + s * D;
    for (int64_t i = 0; i < D; i += kLanes) {
      Float16v v, x;
      Load(value + i, v);
      Load(stream + i, x);
      v = gate * v;
      Store(v, gated + i);
      Store(x + v, stream + i);
    }
    const float scale = InverseRms(gated, D, a.eps);
    for (int64_t i = 0; i < D; i += kLanes) {
      Float16v g, w;
      Load(gated + i, g);
      Load(a.norm_conv + s * D + i, w);
      Store(g * scale * w, gated + i);
    }
  }
}

STRATA_CLONES void ConvolveRow(const NgramGateArgs& a, int64_t t, const float* inputs) {
  const int64_t wide = a.num_streams * a.width;
  float* streams = a.streams + t * wide;
  for (int64_t c = 0; c < wide; c += kLanes) {
    Float16v sum = {};
    for (int64_t j = 0; j < a.num_taps; ++j) {
      Float16v w, u;
      Load(a.conv_weight + j * wide + c, w);
      Load(inputs + j * a.dilation * wide + c, u);
      sum += w * u;
    }
    Float16v gate = sum, x;
    Sigmoid(gate);
    Load(streams + c, x);
    Store(x + sum * gate, streams + c);
  }
}

}  // namespace

void NgramGate(const NgramGateArgs& a) {
  thread_local std::vector<float> shared_inputs;
  std::vector<float>& inputs = shared_inputs;  // [(taps-1) dilation + kept drafts + T, J*D]
  const int64_t wide = a.num_streams * a.width;
  const int64_t history = (a.num_taps - 1) * a.dilation;
  inputs.resize((history + a.num_kept + a.num_live) * wide);
  std::copy_n(a.conv_state, history * wide, inputs.data());
  std::copy_n(a.pending, a.num_kept * wide, inputs.data() + history * wide);
  float* before = inputs.data() + a.num_kept * wide;  // row 0's oldest input
  ThreadPool& pool = ThreadPool::Global();
  pool.Run(a.num_live, [&](int64_t t) { GateRow(a, t, before + (history + t) * wide); });
  pool.Run(a.num_live, [&](int64_t t) { ConvolveRow(a, t, before + t * wide); });
  const float* drafts = before + (history + a.num_certain) * wide;
  std::copy_n(drafts - history * wide, history * wide, a.conv_state);
  std::copy_n(drafts, (a.num_live - a.num_certain) * wide, a.pending);
}

}  // namespace strata
