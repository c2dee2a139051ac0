// The adaptive round of expert_tiers: frequency with hysteresis (reference-engine.md, section 2.7).

#include <algorithm>

#include "weights/expert_tiers.h"

namespace strata {
namespace {

// An expert is worth moving from this use on, and beats a resident only by this margin: one more
// routed token than that must not start a swap back and forth.
constexpr float kLeastUsage = 2.0f;
constexpr float kMargin = 1.5f;

}  // namespace

void ExpertTiers::StartAdapt(int64_t max_swaps, int64_t max_peer_swaps, float decay) {
  if (adapter_ == nullptr || failed()) return;
  FinishAdapt();
  // The worker itself, not adapter_: the destructor empties that before it joins.
  TierWorker* worker = adapter_.get();
  worker->Launch([=, this](ThreadPool&) { AdaptRound(worker, max_swaps, max_peer_swaps, decay); });
}

std::vector<int64_t> ExpertTiers::Heat() const {
  std::vector<int64_t> heat = heat_;
  for (size_t i = 0; i < heat.size(); ++i) heat[i] += counts_[i].load(std::memory_order_relaxed);
  return heat;
}

void ExpertTiers::FinishAdapt() {
  if (adapter_ == nullptr) return;
  while (!adapter_->Finish(std::chrono::milliseconds(1000))) {
    // A round waits for readers and copies; both end. Nothing is lost by waiting on.
  }
  if (const std::exception_ptr error = adapter_->TakeError()) std::rethrow_exception(error);
}

void ExpertTiers::AdaptRound(TierWorker* worker, int64_t max_swaps, int64_t max_peer_swaps,
                             float decay) {
  for (int64_t i = 0; i < num_layers_ * num_experts_; ++i) {
    const uint32_t taken = counts_[i].exchange(0, std::memory_order_relaxed);
    usage_[i] += static_cast<float>(taken);
    heat_[i] += taken;
  }
  const auto swap_all = [this, worker](const std::vector<Swap>& swaps) {
    for (const Swap& swap : swaps) {
      const TierWorker::Step step(worker);
      if (step.wanted()) DoSwap(swap);
    }
  };
  if (options_.primary_bytes > 0) swap_all(PlanSwaps(Tier::kPrimary, max_swaps));
  // The peer takes from what neither device holds by now: nothing moves between devices.
  if (options_.peer_bytes > 0) swap_all(PlanSwaps(Tier::kPeer, max_peer_swaps));
  for (float& usage : usage_) usage *= decay;
}

std::vector<Swap> ExpertTiers::PlanSwaps(Tier tier, int64_t max_swaps) const {
  std::vector<Swap> swaps;
  for (int64_t layer = 0; layer < num_layers_ && max_swaps > 0; ++layer) {
    const float* usage = usage_.data() + layer * num_experts_;
    std::vector<int64_t> candidates, victims;
    for (int64_t e = 0; e < num_experts_; ++e) {
      const Tier now = Find(layer, e).tier;
      if (now == tier) victims.push_back(e);
      if (now != Tier::kPrimary && now != Tier::kPeer && usage[e] >= kLeastUsage) {
        candidates.push_back(e);
      }
    }
    // Ties to the lower id on both sides: the same use gives the same swaps.
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](int64_t a, int64_t b) { return usage[a] > usage[b]; });
    std::stable_sort(victims.begin(), victims.end(),
                     [&](int64_t a, int64_t b) { return usage[a] < usage[b]; });
    for (size_t i = 0; i < std::min(candidates.size(), victims.size()); ++i) {
      const float gain = usage[candidates[i]] - usage[victims[i]];
      if (gain < kMargin) break;
      swaps.push_back({layer, victims[i], candidates[i], tier, gain});
    }
  }
  std::stable_sort(swaps.begin(), swaps.end(),
                   [](const Swap& a, const Swap& b) { return a.gain > b.gain; });
  if (static_cast<int64_t>(swaps.size()) > max_swaps) swaps.resize(max_swaps);
  return swaps;
}

void ExpertTiers::DoSwap(const Swap& swap) {
  // Experts of one layer have one size, so the victim's slot fits the newcomer.
  std::atomic<uint64_t>& victim = words_[swap.layer * num_experts_ + swap.victim];
  const uint64_t slot = victim.load();
  const int64_t offset = Find(swap.layer, swap.victim).offset;
  victim.store(static_cast<uint64_t>(homes_[swap.layer * num_experts_ + swap.victim]) << 56);
  while (readers_[swap.layer].load() != 0) {
    if (failed()) {  // the reader may be one that never comes back: the slot stays the victim's
      victim.store(slot);
      return;
    }
    std::this_thread::yield();
  }
  CopyTo(swap.layer, swap.newcomer, Arena(swap.tier) + offset);
  words_[swap.layer * num_experts_ + swap.newcomer].store(slot);
  counters_.bytes_swapped += layers_[swap.layer].size;
  (swap.tier == Tier::kPeer ? counters_.swaps_peer : counters_.swaps_primary) += 1;
}

}  // namespace strata
