// DeviceStore between windows and prompts: what has to be settled before experts are streamed.
#include <algorithm>
#include <stdexcept>

#include "cuda/device_store.h"
#include "cuda/file_stage.h"
#include "cuda/panels.h"
#include "cuda/peer_store.h"
#include "cuda/will_need.h"

namespace strata {

// Experts that are far away for kernels of the primary: in the host's memory, or in that of another
// device, where a tile would read each as often as it has groups of entries, or in the file.
bool DeviceStore::PassesRing(uint64_t word) const {
  if ((word & (kLinked | kFromFile)) != 0) return true;
  const bool on_peer = (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer);
  return on_peer && peer_ != nullptr && peer_->is_elsewhere() && peer_->is_reached();
}

std::string DeviceStore::AfterWindow() {
  if (swaps_ == nullptr) return "";
  ring_is_stale_ = true;
  return swaps_->AfterWindow();
}

std::string DeviceStore::OpenRing(int64_t num_slots, int64_t min_rows, int64_t patience_ms,
                                  int num_threads) {
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
  if (files_ != nullptr) sizes.stager_threads = num_threads;
  try {
    ring_ = std::make_unique<ExpertRing>(
        sizes, [this](int64_t layer, int64_t expert, int64_t part, uint8_t* slot) {
          MakePanels(layer, expert, part, slot);
        });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// Reads the file: what it does not achieve (a disk that is gone) is the mapping's signal.
void DeviceStore::MakePanels(int64_t layer, int64_t expert, int64_t part, uint8_t* slot) const {
  const ExpertShape& shape = shapes_[layer];
  const ExpertBytes& raw = raw_[layer * num_experts_ + expert];
  const DeviceMatrix& m = part == 0 ? shape.gate : part == 1 ? shape.up : shape.down;
  const uint8_t* rows = part == 0 ? raw.gate : part == 1 ? raw.up : raw.down;
  const int64_t at = part == 0 ? 0 : part == 1 ? shape.up_at : shape.down_at;
  WillNeed(rows, m.rows * (m.cols / m.type->block_values * m.type->block_bytes));
  const PanelShape panels = ShapeOfPanels(*m.type, m.rows, m.cols);
  PackPanels(*m.type, panels, rows, 0, panels.num_panels, slot + at);
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
    const auto* panels = reinterpret_cast<const uint8_t*>(table_[i] & ~kTagBits);
    if ((table_[i] & kFromFile) != 0) panels = nullptr;  // those are a turn's (file_stage.h)
    list.push_back({panels, shapes_[layer].bytes, layer, i % num_experts_});
  }
  error = ring_->SetList(std::move(list));
  ring_is_stale_ = !error.empty();
  return error;
}

}  // namespace strata
