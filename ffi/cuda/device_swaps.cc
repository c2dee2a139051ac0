#include "cuda/device_swaps.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace strata {
namespace {

constexpr int64_t kRetire = 3;  // windows; two would do (see the header)

uint8_t* PanelsAt(uint64_t word) { return reinterpret_cast<uint8_t*>(word & ~kTagBits); }

// Whether the expert is in a slot of the device whose experts have this tag.
bool InSlot(uint64_t word, ExpertTag tag) {
  return (word & kTagBits) == static_cast<uint64_t>(tag);
}

// Whether a newcomer may come from there.
bool OnHost(uint64_t word) { return (word & kLinked) != 0; }

}  // namespace

DeviceSwaps::DeviceSwaps(const SwapSettings& settings, std::vector<uint64_t>* table,
                         uint64_t* wanted, const uint32_t* usage, std::vector<int64_t> slot_bytes,
                         ExpertTag away_tag)
    : settings_(settings),
      table_(table),
      wanted_(wanted),
      usage_(usage),
      slot_bytes_(std::move(slot_bytes)),
      num_layers_(static_cast<int64_t>(slot_bytes_.size())),
      num_experts_(static_cast<int64_t>(table->size()) / num_layers_),
      away_tag_(away_tag),
      last_counts_(table->size()),
      heat_(table->size()),
      fixed_(table->size()),
      sides_{{ExpertTag::kLocal, settings.most, {}}, {ExpertTag::kPeer, settings.on_peer, {}}} {
  const size_t pairs = table->size();
  cudaError_t error = cudaStreamCreateWithFlags(&in_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&out_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&in_done_, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&out_done_, cudaEventDisableTiming);
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&counts_), pairs * 4, cudaHostAllocDefault);
  }
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&table_copy_), pairs * 8, cudaHostAllocDefault);
  }
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("device_swaps: ") + cudaGetErrorString(error));
  }
}

DeviceSwaps::~DeviceSwaps() {
  cudaStreamSynchronize(in_);
  cudaStreamSynchronize(out_);
  cudaEventDestroy(in_done_);
  cudaEventDestroy(out_done_);
  cudaStreamDestroy(in_);
  cudaStreamDestroy(out_);
  cudaFreeHost(counts_);
  cudaFreeHost(table_copy_);
}

void DeviceSwaps::AddSpares(ExpertTag tag, int64_t bytes, uint8_t* on_device, uint8_t* on_host) {
  sides_[tag == ExpertTag::kPeer].spares[bytes].push_back(on_device);
  host_spares_[bytes].push_back(on_host);
}

bool DeviceSwaps::Done(std::string* error) const {
  for (const cudaEvent_t event : {in_done_, out_done_}) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // it is no error, and must not look like one to the next launch
      return false;
    }
    if (status != cudaSuccess) *error = std::string("device_swaps: ") + cudaGetErrorString(status);
  }
  return error->empty();
}

std::string DeviceSwaps::AfterWindow() {
  ++windows_;
  std::string error;
  switch (state_) {
    case State::kIdle:
      if (windows_ % settings_.every == 0) error = StartCount();
      break;
    case State::kCounting:
      if (!Done(&error)) break;
      TakeCounts();
      error = StartCopies();
      break;
    case State::kCopying:
      if (Done(&error)) error = Publish();
      break;
    case State::kPublishing:
      if (!Done(&error)) break;
      retire_at_ = windows_ + kRetire;
      state_ = State::kRetiring;
      break;
    case State::kRetiring:
      if (windows_ < retire_at_) break;
      Retire();
      if (windows_ % settings_.every == 0) error = StartCount();
      break;
  }
  return error;
}

std::string DeviceSwaps::StartCount() {
  cudaError_t error =
      cudaMemcpyAsync(counts_, usage_, last_counts_.size() * 4, cudaMemcpyDeviceToHost, in_);
  if (error == cudaSuccess) error = cudaEventRecord(in_done_, in_);
  if (error == cudaSuccess) error = cudaEventRecord(out_done_, out_);
  state_ = State::kCounting;
  return error == cudaSuccess ? "" : std::string("device_swaps: ") + cudaGetErrorString(error);
}

void DeviceSwaps::TakeCounts() {
  for (size_t i = 0; i < heat_.size(); ++i) {
    heat_[i] += static_cast<float>(counts_[i] - last_counts_[i]);  // they may wrap around
    last_counts_[i] = counts_[i];
  }
}

std::string DeviceSwaps::StartCopies() {
  moves_.clear();
  // What the first side moves is on its way: the second leaves it alone.
  std::vector<bool> moved = fixed_;
  cudaError_t error = cudaSuccess;
  for (Side& side : sides_) {
    if (error == cudaSuccess) error = CopyFor(&side, &moved);
  }
  for (float& heat : heat_) heat *= settings_.decay;
  if (error == cudaSuccess) error = cudaEventRecord(in_done_, in_);
  if (error == cudaSuccess) error = cudaEventRecord(out_done_, out_);
  state_ = moves_.empty() ? State::kIdle : State::kCopying;
  return error == cudaSuccess ? "" : std::string("device_swaps: ") + cudaGetErrorString(error);
}

cudaError_t DeviceSwaps::CopyFor(Side* side, std::vector<bool>* moved) {
  const auto role_of = [&](int64_t layer, int64_t expert) {
    const int64_t index = layer * num_experts_ + expert;
    const uint64_t word = (*table_)[index];
    if ((*moved)[index]) return SwapRole::kNeither;
    if (InSlot(word, side->tag)) return SwapRole::kVictim;
    return OnHost(word) ? SwapRole::kNewcomer : SwapRole::kNeither;
  };
  for (const SwapPair& pair :
       PlanSwapPairs(num_layers_, num_experts_, heat_.data(), role_of, side->most)) {
    const int64_t bytes = slot_bytes_[pair.layer];
    auto& slots = side->spares[bytes];
    auto& panels = host_spares_[bytes];
    if (slots.empty() || panels.empty()) continue;  // a later round's
    const int64_t first = pair.layer * num_experts_;
    uint64_t& newcomer = (*table_)[first + pair.newcomer];
    uint64_t& victim = (*table_)[first + pair.victim];
    moves_.push_back({side, bytes, PanelsAt(victim), PanelsAt(newcomer)});
    (*moved)[first + pair.newcomer] = (*moved)[first + pair.victim] = true;
    uint8_t* slot = slots.back();
    uint8_t* panel = panels.back();
    slots.pop_back();
    panels.pop_back();
    cudaError_t error =
        cudaMemcpyAsync(slot, PanelsAt(newcomer), bytes, cudaMemcpyHostToDevice, in_);
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(panel, PanelsAt(victim), bytes, cudaMemcpyDeviceToHost, out_);
    }
    if (error != cudaSuccess) return error;
    newcomer = ExpertWord(slot, side->tag, false);
    victim = ExpertWord(panel, away_tag_, true);
  }
  return cudaSuccess;
}

std::string DeviceSwaps::Publish() {
  std::memcpy(table_copy_, table_->data(), table_->size() * 8);
  cudaError_t error =
      cudaMemcpyAsync(wanted_, table_copy_, table_->size() * 8, cudaMemcpyHostToDevice, in_);
  if (error == cudaSuccess) error = cudaEventRecord(in_done_, in_);
  state_ = State::kPublishing;
  CountMoves();
  return error == cudaSuccess ? "" : std::string("device_swaps: ") + cudaGetErrorString(error);
}

std::string DeviceSwaps::Settle() {
  cudaError_t error = cudaStreamSynchronize(in_);
  if (error == cudaSuccess) error = cudaStreamSynchronize(out_);
  if (state_ == State::kCounting) TakeCounts();
  if (state_ == State::kCopying) CountMoves();
  Retire();
  return error == cudaSuccess ? "" : std::string("device_swaps: ") + cudaGetErrorString(error);
}

void DeviceSwaps::CountMoves() {
  for (const Move& move : moves_) {
    bytes_ += move.bytes;
    ++move.side->swaps;
  }
}

void DeviceSwaps::Retire() {
  for (const Move& move : moves_) {
    move.side->spares[move.bytes].push_back(move.old_slot);
    host_spares_[move.bytes].push_back(move.old_panels);
  }
  moves_.clear();
  state_ = State::kIdle;
}

}  // namespace strata
