// Which experts to exchange: frequency with hysteresis (reference-engine.md, section 2.7).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace strata {

// One exchange of an expert for another of its layer.
struct SwapPair {
  int64_t layer;
  int64_t victim;
  int64_t newcomer;
  float gain;
};

enum class SwapRole : uint8_t { kNeither, kVictim, kNewcomer };

// The swaps of most gain, at most `max_swaps`, from the use of every expert, [layers * experts].
// The same use gives the same swaps.
std::vector<SwapPair> PlanSwapPairs(int64_t num_layers, int64_t num_experts, const float* usage,
                                    const std::function<SwapRole(int64_t, int64_t)>& role_of,
                                    int64_t max_swaps);

}  // namespace strata
