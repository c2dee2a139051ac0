#include "ops/router_topk.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <vector>

#include "common/numerics.h"

namespace strata {
namespace {

// Float to an unsigned integer of the same order; -0.0 and +0.0 get one value. NaN of either sign
// comes first, so that it reaches the weights instead of hiding behind the experts chosen.
uint32_t OrderedBits(float value) {
  if (value != value) return 0xffffffffu;
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

void RouterTopk(const RouterTopkArgs& args) {
  // Key: the logit's order above the complement of the id, so the largest key is the best expert.
  std::vector<uint64_t> keys(args.num_experts);
  for (int64_t t = 0; t < args.num_rows; ++t) {
    int32_t* ids = args.ids + t * args.num_active;
    float* weights = args.weights + t * args.num_active;
    if (t >= args.num_live) {
      std::fill(ids, ids + args.num_active, 0);
      std::fill(weights, weights + args.num_active, 0.0f);
      args.shared[t] = 0.0f;
      continue;
    }
    const float* logits = args.logits + t * (args.num_experts + 1);
    for (int64_t e = 0; e < args.num_experts; ++e) {
      keys[e] = static_cast<uint64_t>(OrderedBits(logits[e])) << 32 |
                (0xffffffffu - static_cast<uint32_t>(e));
    }
    std::partial_sort(keys.begin(), keys.begin() + args.num_active, keys.end(), std::greater<>());
    float sum = 0.0f;
    for (int64_t a = 0; a < args.num_active; ++a) {
      ids[a] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(keys[a]));
      const float below = logits[ids[a]] - logits[ids[0]];
      weights[a] = below == below ? ExpBounded(below > -87.0f ? below : -87.0f) : below;
      sum += weights[a];
    }
    for (int64_t a = 0; a < args.num_active; ++a) weights[a] /= sum;
    args.shared[t] = 1.0f / (1.0f + std::exp(-logits[args.num_experts]));
  }
}

}  // namespace strata
