// The adaptive round of expert_tiers: frequency with hysteresis (reference-engine.md, section 2.7).

#include "common/swap_plan.h"
#include "weights/expert_tiers.h"

namespace strata {
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
  const auto role_of = [&](int64_t layer, int64_t expert) {
    const Tier now = Find(layer, expert).tier;
    if (now == tier) return SwapRole::kVictim;
    const bool on_device = now == Tier::kPrimary || now == Tier::kPeer;
    return on_device ? SwapRole::kNeither : SwapRole::kNewcomer;
  };
  std::vector<Swap> swaps;
  for (const SwapPair& pair :
       PlanSwapPairs(num_layers_, num_experts_, usage_.data(), role_of, max_swaps)) {
    swaps.push_back({pair, tier});
  }
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
