#include "ops/qsa_attend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/cell_rounding.h"
#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

constexpr int64_t kStrip = 4 * kLanes;  // channels whose sums stay in registers over all cells

struct Workspace {
  std::vector<int64_t> cells;
  std::vector<float> scores;   // [G, cells]
  std::vector<float> key;      // [C]
  std::vector<float> inverse;  // [G]  of the weights' sums
  std::vector<float> values;   // [cells, kStrip]  a strip of every listed cell's value
};

void ListCells(const QsaAttendArgs& a, int64_t t, std::vector<int64_t>& cells) {
  cells.clear();
  const int64_t visible = a.pos + t + 1;
  int64_t tail = 0;
  if (a.ratio > 0) {
    const int32_t* blocks = a.blocks + t * a.num_blocks;
    for (int64_t i = 0; i < a.num_blocks && blocks[i] >= 0; ++i) {
      for (int64_t r = 0; r < a.ratio; ++r) cells.push_back(blocks[i] * a.ratio + r);
    }
    tail = visible / a.ratio * a.ratio;
  }
  for (int64_t cell = tail; cell < visible; ++cell) cells.push_back(cell);
}

// scores <- softmax weights without their division; returns the sum to divide by.
STRATA_CLONES float SoftmaxWeights(float* scores, int64_t count) {
  float largest = scores[0];
  for (int64_t i = 1; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  float total = 0.0f;
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    const int64_t lanes = count - begin < kLanes ? count - begin : kLanes;
    float buffer[kLanes];
    // Lanes past the end hold -87 below the maximum and are not summed.
    for (int64_t i = 0; i < kLanes; ++i) {
      buffer[i] = i < lanes ? scores[begin + i] - largest : -87.0f;
    }
    Float16v e;
    Load(buffer, e);
    Exp(e);
    Store(e, buffer);
    for (int64_t i = 0; i < lanes; ++i) {
      scores[begin + i] = buffer[i];
      total += buffer[i];
    }
  }
  return total;
}

// work.scores <- q . key for the query heads of a key head.
STRATA_CLONES void ScoreCells(const QsaAttendArgs& a, const float* q, int64_t kv_head,
                              Workspace& work) {
  const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int64_t count = static_cast<int64_t>(work.cells.size());
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  work.key.resize(dim);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = work.cells[i] * a.num_kv_heads + kv_head;
    WidenKey(a.cells, head, dim, work.key.data());
    for (int64_t g = 0; g < group; ++g) {
      work.scores[g * count + i] = Dot(q + g * dim, work.key.data(), dim) * scale;
    }
  }
}

// out[0..vectors) <- gated sums of the cells' values, whose strips are in work.values.
STRATA_CLONES void AddStrip(const Workspace& work, const float* weights, float inverse,
                            int64_t vectors, const float* gate, float* out) {
  const int64_t count = static_cast<int64_t>(work.cells.size());
  Float16v sum[4] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t v = 0; v < vectors; ++v) {
      Float16v x;
      Load(work.values.data() + i * kStrip + v * kLanes, x);
      sum[v] += weights[i] * x;
    }
  }
  for (int64_t v = 0; v < vectors; ++v) {
    Float16v gating;
    Load(gate + v * kLanes, gating);
    Sigmoid(gating);
    Store(sum[v] * inverse * gating, out + v * kLanes);
  }
}

void AttendHeads(const QsaAttendArgs& a, int64_t t, int64_t kv_head, Workspace& work) {
  const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int64_t count = static_cast<int64_t>(work.cells.size());
  ScoreCells(a, a.q + (t * a.num_heads + kv_head * group) * dim, kv_head, work);
  work.inverse.resize(group);
  for (int64_t g = 0; g < group; ++g) {
    work.inverse[g] = 1.0f / SoftmaxWeights(work.scores.data() + g * count, count);
  }
  work.values.resize(count * kStrip);
  for (int64_t begin = 0; begin < dim; begin += kStrip) {
    // Widened once for all heads of the group, which read them from a near cache.
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = work.cells[i] * a.num_kv_heads + kv_head;
      WidenValue(a.cells, head, dim, begin, std::min(kStrip, dim - begin),
                 work.values.data() + i * kStrip);
    }
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv_head * group + g;
      const float* gate = a.proj + t * a.proj_stride + (2 * head + 1) * dim + begin;
      AddStrip(work, work.scores.data() + g * count, work.inverse[g],
               std::min<int64_t>(4, (dim - begin) / kLanes), gate,
               a.out + (t * a.num_heads + head) * dim + begin);
    }
  }
}

}  // namespace

void QsaAttend(const QsaAttendArgs& a) {
  ThreadPool::Global().Run(a.num_live * a.num_kv_heads, [&](int64_t job) {
    thread_local Workspace work;
    const int64_t t = job / a.num_kv_heads;
    ListCells(a, t, work.cells);
    work.scores.resize(work.cells.size() * (a.num_heads / a.num_kv_heads));
    AttendHeads(a, t, job % a.num_kv_heads, work);
  });
  const int64_t width = a.num_heads * a.head_dim;
  std::memset(a.out + a.num_live * width, 0, (a.num_rows - a.num_live) * width * sizeof(float));
}

}  // namespace strata
