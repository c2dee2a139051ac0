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

std::string DeviceStore::LendExpert(int64_t layer, int64_t expert, int64_t home) {
  const ExpertShape* shape = GetExpertShape(layer);
  const int64_t index = layer * num_experts_ + expert;
  if (shape == nullptr || expert < 0 || expert >= num_experts_ || raw_[index].gate == nullptr) {
    return "device_store: expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
           " is not there to be lent";
  }
  std::string error;
  uint8_t* to = Place(Arena::kHost, home, shape->bytes, &error);
  if (to == nullptr) return error;
  lent_.Add(&table_, index, to, shape->bytes);
  const auto add = [&](const DeviceMatrix& m, const uint8_t* raw, int64_t at) {
    return Copier().Add(*m.type, m.rows, m.cols, raw, to + at, false);
  };
  error = add(shape->gate, raw_[index].gate, 0);
  if (error.empty()) error = add(shape->up, raw_[index].up, shape->up_at);
  return error.empty() ? add(shape->down, raw_[index].down, shape->down_at) : error;
}

std::string DeviceStore::OpenRing(const RingPlan& plan) {
  if (ring_ != nullptr) return "device_store: a ring is opened once";
  RingSizes sizes;
  sizes.num_layers = num_layers_;
  sizes.num_experts = num_experts_;
  sizes.num_slots = plan.num_slots;
  sizes.min_rows = plan.min_rows;
  sizes.patience_ms = plan.patience_ms;
  const std::vector<bool> is_lent = lent_.Fixed(table_.size());
  if (swaps_ != nullptr) swaps_->SetFixed(is_lent);
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    sizes.slot_bytes = std::max(sizes.slot_bytes, shapes_[layer].bytes);
    // Experts change places within a layer only, so their number there stays.
    int64_t listed = 0;
    for (int64_t i = layer * num_experts_; i < (layer + 1) * num_experts_; ++i) {
      listed += PassesRing(table_[i]) || is_lent[i];
    }
    sizes.most_listed = std::max(sizes.most_listed, listed);
  }
  if (plan.lent_at >= 0) {
    const int64_t slots = plan.num_slots * sizes.slot_bytes;
    if (plan.lent_at + slots + plan.scratch_bytes > expert_bytes_) {
      return "device_store: " + std::to_string(slots + plan.scratch_bytes) +
             " bytes are borrowed at " + std::to_string(plan.lent_at) + " of " +
             std::to_string(expert_bytes_);
    }
    sizes.memory = expert_arena_ + plan.lent_at;
    if (plan.scratch_bytes > 0) {
      scratch_ = sizes.memory + slots;
      scratch_bytes_ = plan.scratch_bytes;
      scratch_above_ = plan.scratch_above;
    }
  }
  if (files_ != nullptr) sizes.stager_threads = plan.num_threads;
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

// With no program under way that reads experts.
std::string DeviceStore::BorrowSlots() {
  if (lent_.empty() || lent_.is_lent()) return "";
  return SettleRing();
}

std::string DeviceStore::GiveSlotsBack() {
  if (!lent_.is_lent()) return "";
  const cudaError_t waited = cudaDeviceSynchronize();
  if (waited != cudaSuccess) return std::string("device_store: ") + cudaGetErrorString(waited);
  // No copy of a pass that never ran may come behind.
  std::string error = ring_->SetList({});
  if (error.empty()) error = lent_.GiveBack();
  ring_is_stale_ = true;
  return error.empty() ? PublishExperts() : error;
}

// Reads the file: what it does not achieve (a disk that is gone) is the mapping's signal.
void DeviceStore::MakePanels(int64_t layer, int64_t expert, int64_t part, uint8_t* slot) const {
  const ExpertShape& shape = shapes_[layer];
  const ExpertBytes& raw = raw_[layer * num_experts_ + expert];
  constexpr int64_t kPieces = ExpertStager::kParts / 3;
  const int64_t which = part / kPieces, piece = part % kPieces;
  const DeviceMatrix& m = which == 0 ? shape.gate : which == 1 ? shape.up : shape.down;
  const uint8_t* rows = which == 0 ? raw.gate : which == 1 ? raw.up : raw.down;
  const int64_t at = which == 0 ? 0 : which == 1 ? shape.up_at : shape.down_at;
  if (piece == 0) WillNeed(rows, m.rows * (m.cols / m.type->block_values * m.type->block_bytes));
  const PanelShape panels = ShapeOfPanels(*m.type, m.rows, m.cols);
  const int64_t first = panels.num_panels * piece / kPieces;
  const int64_t end = panels.num_panels * (piece + 1) / kPieces;
  PackPanels(*m.type, panels, rows, first, end - first, slot + at + first * panels.panel_bytes);
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
  if (!lent_.is_lent()) lent_.Lend(AwayTag());
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
