#include "ops/qsa_select.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <vector>

#include "common/simd.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// Scores of blocks 16g..16g+15, one per lane.
STRATA_CLONES void ScoreGroup(const QsaSelectArgs& a, const float* query, int64_t group,
                              float* out) {
  const float* keys = a.index_keys + group * a.index_dim * kLanes;
  Float16v score = {};
  for (int64_t h = 0; h < a.index_heads; ++h, query += a.index_dim) {
    Float16v even = {}, odd = {};
    for (int64_t i = 0; i + 1 < a.index_dim; i += 2) {
      Float16v k0, k1;
      Load(keys + i * kLanes, k0);
      Load(keys + (i + 1) * kLanes, k1);
      even += query[i] * k0;
      odd += query[i + 1] * k1;
    }
    const Float16v dot = even + odd;
    score += dot > 0.0f ? dot : Float16v{};
  }
  Store(score + 0.0f, out);
}

void SelectRow(const QsaSelectArgs& a, int64_t t, std::vector<uint64_t>& order) {
  int32_t* blocks = a.blocks + t * a.num_blocks;
  const int64_t complete = (a.pos + t + 1) / a.ratio;
  if (complete <= a.num_blocks) {
    for (int64_t i = 0; i < a.num_blocks; ++i)
      blocks[i] = i < complete ? static_cast<int32_t>(i) : -1;
    return;
  }
  // Scores are at least +0, so their bits order like the numbers; the complement of the index below
  // them makes equal scores prefer the lower block.
  order.resize(complete);
  float scores[kLanes];
  for (int64_t begin = 0; begin < complete; begin += kLanes) {
    ScoreGroup(a, a.index_q + t * a.index_heads * a.index_dim, begin / kLanes, scores);
    for (int64_t i = begin; i < std::min(complete, begin + kLanes); ++i) {
      order[i] = static_cast<uint64_t>(std::bit_cast<uint32_t>(scores[i - begin])) << 32 |
                 (0xffffffffu - static_cast<uint32_t>(i));
    }
  }
  std::nth_element(order.begin(), order.begin() + a.num_blocks - 1, order.end(), std::greater<>());
  for (int64_t i = 0; i < a.num_blocks; ++i) {
    blocks[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(order[i]));
  }
  std::sort(blocks, blocks + a.num_blocks);
}

}  // namespace

void QsaSelect(const QsaSelectArgs& a) {
  ThreadPool::Global().Run(a.num_live, [&](int64_t t) {
    thread_local std::vector<uint64_t> order;
    SelectRow(a, t, order);
  });
  std::fill(a.blocks + a.num_live * a.num_blocks, a.blocks + a.num_rows * a.num_blocks, -1);
}

}  // namespace strata
