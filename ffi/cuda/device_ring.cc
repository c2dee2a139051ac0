// DeviceStore between windows and prompts: what has to be settled before experts are streamed.
#include <algorithm>
#include <stdexcept>

#include "cuda/device_store.h"
#include "cuda/file_stage.h"
#include "cuda/panels.h"
#include "cuda/peer_store.h"
#include "cuda/will_need.h"

namespace strata {
namespace {

bool IsPeers(uint64_t word) { return (word & kTagMask) == static_cast<uint64_t>(ExpertTag::kPeer); }

}  // namespace

// Experts that are far away for kernels of the primary: in the host's memory, or in that of another
// device that does not compute, where a tile would read each as often as it has groups of entries,
// or in the file.
bool DeviceStore::PassesRing(uint64_t word) const {
  if ((word & (kLinked | kFromFile)) != 0) return true;
  return IsPeers(word) && peer_ != nullptr && peer_->is_elsewhere() && peer_->tiles() == nullptr;
}

PeerTiles* DeviceStore::PeersTiles() const { return peer_ == nullptr ? nullptr : peer_->tiles(); }

std::string DeviceStore::AfterWindow() {
  if (swaps_ == nullptr) return "";
  ring_is_stale_ = true;
  return swaps_->AfterWindow();
}

std::string DeviceStore::OpenTimeline(int64_t capacity) {
  timeline_ = std::make_unique<Timeline>(capacity);
  return peer_ == nullptr ? "" : peer_->OpenTimeline(capacity);
}

std::vector<std::pair<uint64_t, uint64_t>> DeviceStore::TakePeerTimeline() {
  if (peer_ == nullptr) return {};
  return peer_->TakeTimeline();
}

std::string DeviceStore::OpenPeerAttention(const PeerAttentionSizes& sizes) {
  return peer_ == nullptr ? "device_store: it has no peer" : peer_->OpenAttention(sizes);
}

PeerAttention* PeersAttention(int64_t slot) {
  const auto held = slot < 0 ? nullptr : FindDeviceStore(slot);
  return held == nullptr || held->peer() == nullptr ? nullptr : held->peer()->attention();
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

// Experts change places within a layer only, so their number there stays.
RingSizes DeviceStore::SizesOfRing(const RingPlan& plan, double share, bool is_peers) const {
  RingSizes sizes;
  sizes.num_layers = num_layers_;
  sizes.num_experts = num_experts_;
  sizes.num_slots = plan.num_slots;
  sizes.min_rows = plan.min_rows;
  sizes.patience_ms = plan.patience_ms;
  const std::vector<bool> is_lent = lent_.Fixed(table_.size());
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    sizes.slot_bytes = std::max(sizes.slot_bytes, shapes_[layer].bytes);
    int64_t linked = 0, listed = 0;
    for (int64_t i = layer * num_experts_; i < (layer + 1) * num_experts_; ++i) {
      linked += (table_[i] & kLinked) != 0 || is_lent[i];
      listed += PassesRing(table_[i]) || is_lent[i];
    }
    const int64_t taken = PeerShare(share).Of(linked);
    sizes.most_listed = std::max(sizes.most_listed, is_peers ? taken : listed - taken);
  }
  return sizes;
}

std::string DeviceStore::OpenPeerTiles(const PeerTileSettings& settings) {
  if (peer_ == nullptr || ring_ != nullptr) {
    return "device_store: a peer's part in prompts is opened behind the peer and before the ring";
  }
  PeerTileSizes sizes;
  sizes.max_rows = settings.max_rows;
  sizes.num_active = doors_.num_active;
  sizes.num_experts = num_experts_;
  sizes.num_layers = num_layers_;
  sizes.width = doors_.width;
  for (const ExpertShape& shape : shapes_) sizes.hidden = std::max(sizes.hidden, shape.gate.rows);
  std::string error = peer_->OpenTiles(sizes);
  if (error.empty() && settings.num_slots > 0) {
    RingPlan plan;
    plan.num_slots = settings.num_slots;
    plan.min_rows = settings.min_rows;
    plan.patience_ms = settings.patience_ms;
    const RingSizes ring = SizesOfRing(plan, settings.share, true);
    error = PeersTiles()->OpenRing(ring, settings.share);
  }
  for (int64_t layer = 0; layer < num_layers_ && error.empty(); ++layer) {
    error = PeersTiles()->Warm(shapes_[layer]);
  }
  return error;
}

std::string DeviceStore::OpenRing(const RingPlan& plan) {
  if (ring_ != nullptr) return "device_store: a ring is opened once";
  const double share = PeersTiles() == nullptr ? 0.0 : PeersTiles()->share();
  RingSizes sizes = SizesOfRing(plan, share, false);
  if (swaps_ != nullptr) swaps_->SetFixed(lent_.Fixed(table_.size()));
  if (peer_ != nullptr && !peer_->is_reached()) sizes.far_device = peer_->device();
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
  if (lent_.empty() || (lent_.is_lent() && !ring_is_stale_)) return "";
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
  if (!error.empty()) return error;
  error = PublishExperts();
  if (!error.empty()) lent_.Lend(AwayTag());  // as kernels find it
  return error;
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
  ExpertRing* peers = PeersTiles() == nullptr ? nullptr : PeersTiles()->ring();
  ExpertRing* first = ring_ == nullptr ? peers : ring_.get();
  if (first == nullptr || num_rows < first->sizes().min_rows) return "";
  if (ring_is_stale_) {
    const std::string error = SettleRing();
    if (!error.empty()) return error;
  }
  const std::string error = first->BeginPass();
  return error.empty() && peers != nullptr && peers != first ? peers->BeginPass() : error;
}

// Words lag behind the host's table while experts move (device_swaps.h). A pass goes by one list,
// so nothing moves while passes are under way, and before the first of them words are brought up to
// date; to wait for the device once a prompt costs less than a kernel that knows of both.
std::string DeviceStore::SettleRing() {
  ring_is_stale_ = true;  // until all of it is done
  cudaError_t waited = cudaDeviceSynchronize();
  if (waited != cudaSuccess) return std::string("device_store: ") + cudaGetErrorString(waited);
  std::string error = swaps_ == nullptr ? "" : swaps_->Settle();
  if (!lent_.is_lent()) lent_.Lend(AwayTag());
  if (error.empty()) error = PublishExperts();
  if (!error.empty()) return error;
  const bool is_shared = PeersTiles() != nullptr && PeersTiles()->ring() != nullptr;
  std::vector<ExpertRing::Entry> list, peers;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    PeerShare share(is_shared ? PeersTiles()->share() : 0.0);
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
      const uint64_t word = table_[layer * num_experts_ + expert];
      if (!PassesRing(word)) continue;
      const bool is_far = IsPeers(word) && !peer_->is_reached();
      const auto* panels = reinterpret_cast<const uint8_t*>(word & ~kTagBits);
      if ((word & kFromFile) != 0) panels = nullptr;  // those are a turn's (file_stage.h)
      const bool is_theirs = (word & kLinked) != 0 && share.Next();
      (is_theirs ? peers : list).push_back({panels, shapes_[layer].bytes, layer, expert, is_far});
    }
  }
  if (ring_ != nullptr) error = ring_->SetList(std::move(list));
  if (error.empty() && is_shared) error = PeersTiles()->SetTaken(std::move(peers));
  ring_is_stale_ = !error.empty();
  return error;
}

}  // namespace strata
