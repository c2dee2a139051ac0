#include "ops/qsa_append.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/cell_rounding.h"
#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// cos and sin of one position, [R/2] each.
struct Rotation {
  std::vector<float> cos;
  std::vector<float> sin;
};

void SetPosition(const QsaAppendArgs& a, int64_t position, Rotation& rotation) {
  rotation.cos.resize(a.rotated / 2);
  rotation.sin.resize(a.rotated / 2);
  for (int64_t j = 0; j < a.rotated / 2; ++j) {
    const float angle = static_cast<float>(position) * a.inv_freq[j];
    rotation.cos[j] = std::cos(angle);
    rotation.sin[j] = std::sin(angle);
  }
}

// to = rotate(from / rms * weight); may be in place.
void NormRotate(const float* from, const float* weight, const Rotation& rotation, int64_t dim,
                float eps, float* to) {
  const float scale = 1.0f / std::sqrt(Dot(from, from, dim) / static_cast<float>(dim) + eps);
  for (int64_t i = 0; i < dim; ++i) to[i] = from[i] * scale * weight[i];
  const int64_t half = static_cast<int64_t>(rotation.cos.size());
  for (int64_t j = 0; j < half; ++j) {
    const float low = to[j];
    const float high = to[half + j];
    to[j] = low * rotation.cos[j] - high * rotation.sin[j];
    to[half + j] = high * rotation.cos[j] + low * rotation.sin[j];
  }
}

void AppendRow(const QsaAppendArgs& a, int64_t t, int64_t proj_width, Rotation& rotation,
               std::vector<float>& key) {
  const int64_t cell = a.pos + t;
  SetPosition(a, a.origin + cell, rotation);
  const float* from = a.proj + t * proj_width;
  for (int64_t h = 0; h < a.num_heads; ++h, from += 2 * a.head_dim) {
    NormRotate(from, a.q_norm, rotation, a.head_dim, a.eps,
               a.q + (t * a.num_heads + h) * a.head_dim);
  }
  const int64_t kv_width = a.num_kv_heads * a.head_dim;
  key.resize(a.head_dim);
  for (int64_t h = 0; h < a.num_kv_heads; ++h) {
    const int64_t head = cell * a.num_kv_heads + h;
    NormRotate(from + h * a.head_dim, a.k_norm, rotation, a.head_dim, a.eps, key.data());
    StoreKey(a.cells, head, a.head_dim, key.data());
    StoreValue(a.cells, head, a.head_dim, from + kv_width + h * a.head_dim);
  }
  from += 2 * kv_width;
  for (int64_t h = 0; h < a.index_heads; ++h, from += a.index_dim) {
    NormRotate(from, a.index_q_norm, rotation, a.index_dim, a.eps,
               a.index_q + (t * a.index_heads + h) * a.index_dim);
  }
  if (a.index_heads > 0) {
    std::memcpy(a.index_raw + cell * a.index_dim, from, a.index_dim * sizeof(float));
  }
}

void PoolBlock(const QsaAppendArgs& a, int64_t block, Rotation& rotation, std::vector<float>& key) {
  key.assign(a.index_dim, 0.0f);
  for (int64_t r = 0; r < a.ratio; ++r) {
    const float* raw = a.index_raw + (block * a.ratio + r) * a.index_dim;
    for (int64_t i = 0; i < a.index_dim; ++i) key[i] += raw[i];
  }
  for (float& value : key) value /= static_cast<float>(a.ratio);
  SetPosition(a, a.origin + block * a.ratio, rotation);
  NormRotate(key.data(), a.index_k_norm, rotation, a.index_dim, a.eps, key.data());
  float* to = a.index_keys + block / 16 * a.index_dim * 16 + block % 16;
  for (int64_t i = 0; i < a.index_dim; ++i) to[i * 16] = key[i];
}

}  // namespace

void QsaAppend(const QsaAppendArgs& a) {
  const int64_t proj_width = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim +
                             (a.index_heads > 0 ? (a.index_heads + 1) * a.index_dim : 0);
  ThreadPool& pool = ThreadPool::Global();
  pool.Run(a.num_live, [&](int64_t t) {
    thread_local Rotation rotation;
    thread_local std::vector<float> key;
    AppendRow(a, t, proj_width, rotation, key);
  });
  if (a.index_heads > 0) {
    // Blocks whose last cell this window wrote.
    const int64_t first = a.pos / a.ratio;
    const int64_t last = (a.pos + a.num_live) / a.ratio;
    pool.Run(last - first, [&](int64_t i) {
      thread_local Rotation rotation;
      thread_local std::vector<float> key;
      PoolBlock(a, first + i, rotation, key);
    });
  }
  const int64_t dead = a.num_rows - a.num_live;
  std::memset(a.q + a.num_live * a.num_heads * a.head_dim, 0,
              dead * a.num_heads * a.head_dim * sizeof(float));
  if (a.index_heads > 0) {
    std::memset(a.index_q + a.num_live * a.index_heads * a.index_dim, 0,
                dead * a.index_heads * a.index_dim * sizeof(float));
  }
}

}  // namespace strata
