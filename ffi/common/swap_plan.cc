#include "common/swap_plan.h"

#include <algorithm>

namespace strata {
namespace {

// An expert is worth moving from this use on, and beats a resident only by this margin: one more
// routed token than that must not start a swap back and forth.
constexpr float kLeastUsage = 2.0f;
constexpr float kMargin = 1.5f;

}  // namespace

std::vector<SwapPair> PlanSwapPairs(int64_t num_layers, int64_t num_experts, const float* usage,
                                    const std::function<SwapRole(int64_t, int64_t)>& role_of,
                                    int64_t max_swaps) {
  std::vector<SwapPair> swaps;
  std::vector<int64_t> newcomers, victims;
  for (int64_t layer = 0; layer < num_layers && max_swaps > 0; ++layer) {
    const float* used = usage + layer * num_experts;
    newcomers.clear();
    victims.clear();
    for (int64_t e = 0; e < num_experts; ++e) {
      const SwapRole role = role_of(layer, e);
      if (role == SwapRole::kVictim) victims.push_back(e);
      if (role == SwapRole::kNewcomer && used[e] >= kLeastUsage) newcomers.push_back(e);
    }
    // Ties to the lower id on both sides.
    std::stable_sort(newcomers.begin(), newcomers.end(),
                     [&](int64_t a, int64_t b) { return used[a] > used[b]; });
    const size_t pairs = std::min(newcomers.size(), victims.size());
    std::partial_sort(
        victims.begin(), victims.begin() + static_cast<int64_t>(pairs), victims.end(),
        [&](int64_t a, int64_t b) { return used[a] != used[b] ? used[a] < used[b] : a < b; });
    for (size_t i = 0; i < pairs; ++i) {
      const float gain = used[newcomers[i]] - used[victims[i]];
      if (gain < kMargin) break;
      swaps.push_back({layer, victims[i], newcomers[i], gain});
    }
  }
  std::stable_sort(swaps.begin(), swaps.end(),
                   [](const SwapPair& a, const SwapPair& b) { return a.gain > b.gain; });
  if (static_cast<int64_t>(swaps.size()) > max_swaps) swaps.resize(max_swaps);
  return swaps;
}

}  // namespace strata
