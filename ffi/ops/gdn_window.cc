#include "ops/gdn_window.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the q and k normalisation, fixed by the model

struct Workspace {
  std::vector<float> inputs;  // [K-1+T, channels]  the state's rows, then the window's
  std::vector<float> qkv;     // [T, channels]      after convolution and SiLU; q and k normalised
  std::vector<float> gates;   // [T, 2 Vh]          d, b
};

struct Sizes {
  int64_t channels;
  int64_t proj;  // stride of a projection row
};

Sizes SizesOf(const GdnWindowArgs& a) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * a.head_dim;
  return {channels, channels + a.value_heads * a.head_dim + 2 * a.value_heads};
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

// Sixteen value columns of one head through all live rows: their part of S stays in the first
// cache.
STRATA_CLONES void DeltaRulePanel(const GdnWindowArgs& a, const Workspace& work, int64_t channels,
                                  int64_t head, int64_t column) {
  const int64_t dim = a.head_dim;
  const int64_t key_head = head % a.key_heads;
  float* state = a.state + head * dim * dim + column;
  for (int64_t t = 0; t < a.num_live; ++t) {
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
        Load(state + (i + j) * dim, s);
        sum[j] += k[i + j] * s;
      }
    }
    const Float16v recalled = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const Float16v u = beta * (v - decay * recalled);
    Float16v out[4] = {};
    for (int64_t i = 0; i < dim; i += 4) {
      for (int j = 0; j < 4; ++j) {
        Float16v s;
        Load(state + (i + j) * dim, s);
        s = decay * s + k[i + j] * u;
        Store(s, state + (i + j) * dim);
        out[j] += q[i + j] * s;
      }
    }
    Store((out[0] + out[1]) + (out[2] + out[3]), a.y + (t * a.value_heads + head) * dim + column);
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

}  // namespace

void GdnWindow(const GdnWindowArgs& a) {
  thread_local Workspace shared_work;
  Workspace& work = shared_work;
  const auto [channels, proj_width] = SizesOf(a);
  const int64_t history = a.num_taps - 1;
  work.inputs.resize((history + a.num_live) * channels);
  work.qkv.resize(a.num_live * channels);
  work.gates.resize(a.num_live * 2 * a.value_heads);
  std::memcpy(work.inputs.data(), a.conv_state, history * channels * sizeof(float));
  for (int64_t t = 0; t < a.num_live; ++t) {
    std::memcpy(work.inputs.data() + (history + t) * channels, a.proj + t * proj_width,
                channels * sizeof(float));
  }
  ThreadPool& pool = ThreadPool::Global();
  pool.Run(a.num_live, [&](int64_t t) {
    ConvolveRow(a, work.inputs.data() + t * channels, channels, work.qkv.data() + t * channels);
    const float* alpha = a.proj + t * proj_width + channels + a.value_heads * a.head_dim;
    GatesOfRow(a, alpha, alpha + a.value_heads, work.gates.data() + t * 2 * a.value_heads);
  });
  const int64_t panels = a.head_dim / kLanes;
  pool.Run(a.value_heads, [&](int64_t head) {
    for (int64_t p = 0; p < panels; ++p) DeltaRulePanel(a, work, channels, head, p * kLanes);
  });
  pool.Run(a.num_live, [&](int64_t t) {
    GatedNormRow(a, a.proj + t * proj_width + channels, a.y + t * a.value_heads * a.head_dim);
  });
  std::memcpy(a.conv_state, work.inputs.data() + a.num_live * channels,
              history * channels * sizeof(float));
  const int64_t width = a.value_heads * a.head_dim;
  std::memset(a.y + a.num_live * width, 0, (a.num_rows - a.num_live) * width * sizeof(float));
}

}  // namespace strata
