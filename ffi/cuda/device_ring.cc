// DeviceStore between windows and prompts: what has to be settled before experts are streamed.
#include <algorithm>
#include <stdexcept>

#include "cuda/device_store.h"
#include "cuda/peer_store.h"

namespace strata {

// Experts that are far away for kernels of the primary: in the host's memory, or in that of another
// device, where a tile would read each as often as it has groups of entries.
bool DeviceStore::PassesRing(uint64_t word) const {
  if ((word & kLinked) != 0) return true;
  const bool on_peer = (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer);
  return on_peer && peer_ != nullptr && peer_->is_elsewhere() && peer_->is_reached();
}

std::string DeviceStore::AfterWindow() {
  if (swaps_ == nullptr) return "";
  ring_is_stale_ = true;
  return swaps_->AfterWindow();
}

std::string DeviceStore::OpenRing(int64_t num_slots, int64_t min_rows, int64_t patience_ms) {
  if (ring_ != nullptr) return "device_store: a ring is opened once";
  RingSizes sizes;
  sizes.num_layers = num_layers_;
  sizes.num_experts = num_experts_;
  sizes.num_slots = num_slots;
  sizes.min_rows = min_rows;
  sizes.patience_ms = patience_ms;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    sizes.slot_bytes = std::max(sizes.slot_bytes, shapes_[layer].bytes);
    // Experts change places within a layer only, so their number there stays.
    const auto first = table_.begin() + layer * num_experts_;
    const auto listed = std::count_if(first, first + num_experts_,
                                      [this](uint64_t word) { return PassesRing(word); });
    sizes.most_listed = std::max<int64_t>(sizes.most_listed, listed);
  }
  try {
    ring_ = std::make_unique<ExpertRing>(sizes);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string DeviceStore::BeginPass(int64_t num_rows) {
  if (ring_ == nullptr || num_rows < ring_->sizes().min_rows) return "";
  if (ring_is_stale_) {
    const std::string error = SettleRing();
    if (!error.empty()) return error;
  }
  return ring_->BeginPass();
}

// Words lag behind the host's table while experts move (device_swaps.h). A pass goes by one list,
// so nothing moves while passes are under way, and before the first of them words are brought up to
// date; to wait for the device once a prompt costs less than a kernel that knows of both.
std::string DeviceStore::SettleRing() {
  cudaError_t waited = cudaDeviceSynchronize();
  if (waited != cudaSuccess) return std::string("device_store: ") + cudaGetErrorString(waited);
  std::string error = swaps_ == nullptr ? "" : swaps_->Settle();
  if (error.empty()) error = PublishExperts();
  if (!error.empty()) return error;
  std::vector<ExpertRing::Entry> list;
  for (int64_t i = 0; i < static_cast<int64_t>(table_.size()); ++i) {
    if (!PassesRing(table_[i])) continue;
    const int64_t layer = i / num_experts_;
    list.push_back({reinterpret_cast<const uint8_t*>(table_[i] & ~kTagBits), shapes_[layer].bytes,
                    layer, i % num_experts_});
  }
  error = ring_->SetList(std::move(list));
  ring_is_stale_ = !error.empty();
  return error;
}

}  // namespace strata
