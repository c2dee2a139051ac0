#include "ops/gdn_window.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the q and k normalisation, fixed by the model

// Rows are counted from the first one that is replayed: V = num_kept + num_live.
struct Workspace {
  std::vector<float> inputs;   // [K-1+V, channels]  the state's rows, then those
  std::vector<float> qkv;      // [V, channels]      after convolution and SiLU; q and k normalised
  std::vector<float> gates;    // [V, 2 Vh]          d, b
  std::vector<float> drafted;  // [Vh, C, 16]       a panel of S for drafts, which leave no trace
};

struct Sizes {
  int64_t channels;
  int64_t proj;     // stride of a projection row
  int64_t pending;  // stride of a draft's row
};

Sizes SizesOf(const GdnWindowArgs& a) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * a.head_dim;
  const int64_t gates = 2 * a.value_heads;
  return {channels, channels + a.value_heads * a.head_dim + gates, channels + gates};
}

// What row v puts into the recurrence.
struct Source {
  const float* qkv;
  const float* gates;  // alpha, then beta
};

Source SourceOf(const GdnWindowArgs& a, const Sizes& sizes, int64_t v) {
  if (v < a.num_kept) {
    const float* row = a.pending + v * sizes.pending;
    return {row, row + sizes.channels};
  }
  const float* row = a.proj + (v - a.num_kept) * sizes.proj;
  return {row, row + sizes.channels + a.value_heads * a.head_dim};
}

STRATA_CLONES void ConvolveRow(const GdnWindowArgs& a, const float* inputs, int64_t channels,
                               float* out) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    Float16v sum = {};
    for (int64_t j = 0; j < a.num_taps; ++j) {
      Float16v w, u;
      Load(a.conv_weight + j * channels + c, w);
      Load(inputs + j * channels + c, u);
      sum += w * u;
    }
    Float16v gate = sum;
    Sigmoid(gate);
    Store(sum * gate, out + c);
  }
  const int64_t dim = a.head_dim;
  for (int64_t h = 0; h < 2 * a.key_heads; ++h) {
    float* x = out + h * dim;
    float scale = 1.0f / std::sqrt(Dot(x, x, dim) + kUnitEps);
    if (h < a.key_heads) scale *= 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t i = 0; i < dim; ++i) x[i] *= scale;
  }
}

void GatesOfRow(const GdnWindowArgs& a, const float* alpha, const float* beta, float* gates) {
  for (int64_t h = 0; h < a.value_heads; ++h) {
    const float x = alpha[h] + a.dt_bias[h];
    const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
    gates[h] = std::exp(a.decay[h] * softplus);
    gates[a.value_heads + h] = 1.0f / (1.0f + std::exp(-beta[h]));
  }
}

// A copy of the panel that `state` points to, for drafts; rows of it are kLanes apart.
float* CopiedPanel(Workspace& work, const float* state, int64_t head, int64_t dim) {
  float* copy = work.drafted.data() + head * dim * kLanes;
  for (int64_t i = 0; i < dim; ++i) std::copy_n(state + i * dim, kLanes, copy + i * kLanes);
  return copy;
}

// Sixteen value columns of one head through all rows: their part of S stays in the first cache.
STRATA_CLONES void DeltaRulePanel(const GdnWindowArgs& a, Workspace& work, int64_t channels,
                                  int64_t head, int64_t column) {
  const int64_t dim = a.head_dim;
  const int64_t key_head = head % a.key_heads;
  const int64_t num_rows = a.num_kept + a.num_live;
  float* state = a.state + head * dim * dim + column;
  int64_t stride = dim;
  for (int64_t t = 0; t < num_rows; ++t) {
    if (t == a.num_kept + a.num_certain) {
      state = CopiedPanel(work, state, head, dim);
      stride = kLanes;
    }
    const float* row = work.qkv.data() + t * channels;
    const float* q = row + key_head * dim;
    const float* k = row + (a.key_heads + key_head) * dim;
    const float decay = work.gates[t * 2 * a.value_heads + head];
    const float beta = work.gates[(t * 2 + 1) * a.value_heads + head];
    Float16v v, sum[4] = {};
    Load(row + (2 * a.key_heads + head) * dim + column, v);
    for (int64_t i = 0; i < dim; i += 4) {
      for (int j = 0; j < 4; ++j) {
        Float16v s;
        Load(state + (i + j) * stride, s);
        sum[j] += k[i + j] * s;
      }
    }
    const Float16v recalled = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const Float16v u = beta * (v - decay * recalled);
    Float16v out[4] = {};
    for (int64_t i = 0; i < dim; i += 4) {
      for (int j = 0; j < 4; ++j) {
        Float16v s;
        Load(state + (i + j) * stride, s);
        s = decay * s + k[i + j] * u;
        Store(s, state + (i + j) * stride);
        out[j] += q[i + j] * s;
      }
    }
    if (t < a.num_kept) continue;
    float* y = a.y + ((t - a.num_kept) * a.value_heads + head) * dim + column;
    Store((out[0] + out[1]) + (out[2] + out[3]), y);
  }
}

STRATA_CLONES void GatedNormRow(const GdnWindowArgs& a, const float* z, float* y) {
  const int64_t dim = a.head_dim;
  for (int64_t h = 0; h < a.value_heads; ++h, z += dim, y += dim) {
    const float scale = 1.0f / std::sqrt(Dot(y, y, dim) / static_cast<float>(dim) + a.eps);
    for (int64_t i = 0; i < dim; i += kLanes) {
      Float16v gate, w, o;
      Load(z + i, gate);
      Load(a.norm_weight + i, w);
      Load(y + i, o);
      Sigmoid(gate);
      Store(o * scale * w * gate, y + i);
    }
  }
}

// The certain rows' last inputs, and what the drafts put into the recurrence.
void LeaveStates(const GdnWindowArgs& a, const Sizes& sizes, const Workspace& work) {
  const int64_t history = (a.num_taps - 1) * sizes.channels;
  const int64_t committed = a.num_kept + a.num_certain;
  std::copy_n(work.inputs.data() + committed * sizes.channels, history, a.conv_state);
  for (int64_t v = committed; v < a.num_kept + a.num_live; ++v) {
    const Source source = SourceOf(a, sizes, v);
    float* to = a.pending + (v - committed) * sizes.pending;
    std::copy_n(source.qkv, sizes.channels, to);
    std::copy_n(source.gates, 2 * a.value_heads, to + sizes.channels);
  }
}

}  // namespace

void GdnWindow(const GdnWindowArgs& a) {
  thread_local Workspace shared_work;
  Workspace& work = shared_work;
  const Sizes sizes = SizesOf(a);
  const int64_t channels = sizes.channels;
  const int64_t history = a.num_taps - 1;
  const int64_t num_rows = a.num_kept + a.num_live;
  work.inputs.resize((history + num_rows) * channels);
  work.qkv.resize(num_rows * channels);
  work.gates.resize(num_rows * 2 * a.value_heads);
  if (a.num_live > a.num_certain) work.drafted.resize(a.value_heads * a.head_dim * kLanes);
  std::copy_n(a.conv_state, history * channels, work.inputs.data());
  for (int64_t v = 0; v < num_rows; ++v) {
    std::copy_n(SourceOf(a, sizes, v).qkv, channels, work.inputs.data() + (history + v) * channels);
  }
  ThreadPool& pool = ThreadPool::Global();
  pool.Run(num_rows, [&](int64_t v) {
    ConvolveRow(a, work.inputs.data() + v * channels, channels, work.qkv.data() + v * channels);
    const float* alpha = SourceOf(a, sizes, v).gates;
    GatesOfRow(a, alpha, alpha + a.value_heads, work.gates.data() + v * 2 * a.value_heads);
  });
  const int64_t panels = a.head_dim / kLanes;
  pool.Run(a.value_heads, [&](int64_t head) {
    for (int64_t p = 0; p < panels; ++p) DeltaRulePanel(a, work, channels, head, p * kLanes);
  });
  pool.Run(a.num_live, [&](int64_t t) {
    GatedNormRow(a, a.proj + t * sizes.proj + channels, a.y + t * a.value_heads * a.head_dim);
  });
  LeaveStates(a, sizes, work);
  const int64_t width = a.value_heads * a.head_dim;
  std::fill_n(a.y + a.num_live * width, (a.num_rows - a.num_live) * width, 0.0f);
}

}  // namespace strata
