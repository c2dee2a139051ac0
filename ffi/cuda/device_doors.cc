// The doors of a device store: tags, the mailbox with the host's threads behind it, the peer.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "cuda/device_store.h"
#include "cuda/file_stage.h"
#include "cuda/host_workers.h"
#include "cuda/peer_store.h"

namespace strata {
namespace {

// How long a lost thread is given to come home before a request is refused, or a store closed.
constexpr std::chrono::milliseconds kGrace{1000};

Matrix RawShape(const DeviceMatrix& m) { return {nullptr, m.type, 1, m.rows, m.cols, m.rows}; }

}  // namespace

std::string DeviceStore::SetTag(int64_t layer, int64_t expert, ExpertTag tag) {
  if (GetExpertShape(layer) == nullptr || expert < 0 || expert >= num_experts_) {
    return "device_store: no expert " + std::to_string(expert) + " in layer " +
           std::to_string(layer);
  }
  if (tag != ExpertTag::kLocal && doors() == nullptr) {
    return "device_store: it has no doors, so every expert is local";
  }
  if (tag == ExpertTag::kHost && host_ == nullptr) {
    return "device_store: no threads of the host were started";
  }
  uint64_t& word = table_[layer * num_experts_ + expert];
  word = (word & ~kTagMask) | static_cast<uint64_t>(tag);
  return "";
}

std::string DeviceStore::OpenDoors(int64_t window_rows, int64_t num_active, int64_t width) {
  if (window_rows < 1 || window_rows > kMostLetterRows || num_active < 1 ||
      num_active > kMostDoorEntries || width < 1 || width % 4 != 0) {
    return "device_store: doors for " + std::to_string(window_rows) + " rows of " +
           std::to_string(num_active) + " experts, expected 1 to " +
           std::to_string(kMostLetterRows) + " and 1 to " + std::to_string(kMostDoorEntries);
  }
  cudaError_t error = cudaMalloc(&doors_.homes, kEntryHomes * 4);
  if (error == cudaSuccess) error = cudaMemset(doors_.homes, 0, kEntryHomes * 4);
  if (error != cudaSuccess) return Failed("memory for counts", kEntryHomes * 4, error);
  doors_.num_active = num_active;
  doors_.width = width;
  doors_.streamed_always.resize(num_active + 1);
  std::iota(doors_.streamed_always.begin(), doors_.streamed_always.end(), uint8_t{0});
  doors_.streamed = doors_.streamed_always;
  doors_.window_rows = window_rows;
  return "";
}

std::string DeviceStore::SetStreamed(const std::vector<uint8_t>& streamed) {
  if (streamed.size() != doors_.streamed_always.size()) {
    return "device_store: a share for " + std::to_string(streamed.size()) + " counts of misses, " +
           std::to_string(doors_.streamed_always.size()) + " expected";
  }
  for (size_t n = 0; n < streamed.size(); ++n) {
    if (streamed[n] > n) return "device_store: more than all misses are to be streamed";
  }
  doors_.streamed = streamed;
  return "";
}

std::string DeviceStore::OpenPeer(int device, bool through_host, int64_t expert_bytes,
                                  int64_t hidden, int64_t most_rows) {
  if (doors() == nullptr || peer_ != nullptr) {
    return "device_store: a peer is opened once, behind the doors";
  }
  PeerSizes sizes;
  sizes.expert_bytes = expert_bytes;
  sizes.max_rows = most_rows;
  sizes.num_active = doors_.num_active;
  sizes.num_experts = num_experts_;
  sizes.width = doors_.width;
  sizes.hidden = hidden;
  try {
    peer_ = std::make_unique<PeerStore>(device, through_host, sizes);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string DeviceStore::StartHost(int num_threads, int64_t timeout_ms) {
  if (doors() == nullptr || host_ != nullptr || num_threads < 1 || timeout_ms < 1) {
    return "device_store: " + std::to_string(num_threads) + " threads and " +
           std::to_string(timeout_ms) + " ms, expected at least 1, once, behind open doors";
  }
  std::vector<HostLayer> layers;
  for (const ExpertShape& shape : shapes_) {
    if (shape.bytes == 0) return "device_store: a layer has no experts yet";
    layers.push_back({RawShape(shape.gate), RawShape(shape.up), RawShape(shape.down)});
  }
  MailboxAt at;
  at.sizes = SizesOfMailbox(doors_.window_rows, doors_.num_active, doors_.width);
  const int64_t box_bytes = int64_t{sizeof(Bell)} + 2 * int64_t{at.sizes.letter_bytes};
  const int64_t row_bytes = 2 * at.sizes.row_floats * 4;
  const auto mapped = [](auto** host, auto** device, int64_t bytes) {
    const cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(host), bytes,
                                            cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) return error;
    std::memset(static_cast<void*>(*host), 0, bytes);
    return cudaHostGetDevicePointer(device, *host, 0);
  };
  cudaError_t error = mapped(&box_, &at.box, box_bytes);
  if (error == cudaSuccess) error = mapped(&host_rows_, &at.rows, row_bytes);
  if (error == cudaSuccess) error = cudaMalloc(&at.state, sizeof(MailboxState));
  if (error == cudaSuccess) error = cudaMemset(at.state, 0, sizeof(MailboxState));
  if (error != cudaSuccess) {
    cudaFree(at.state);
    return Failed("the mailbox", box_bytes + row_bytes, error);
  }
  SetTimeout(timeout_ms);
  std::vector<bool> in_file(raw_.size());
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    for (const int32_t expert : in_file_[layer]) in_file[layer * num_experts_ + expert] = true;
  }
  host_ = std::make_unique<HostWorkers>(box_, host_rows_, at.sizes, std::move(layers), raw_,
                                        std::move(in_file), num_threads);
  doors_.mailbox = at;
  return "";
}

std::string DeviceStore::StartFiles(int num_threads, int64_t timeout_ms) {
  if (host_ == nullptr || files_ != nullptr || num_threads < 1) {
    return "device_store: experts stay in the file, and no threads of the host were started";
  }
  std::vector<FileStage::Layer> layers;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    if (in_file_[layer].empty()) continue;
    layers.push_back({shapes_[layer], {}});
    for (const int32_t expert : in_file_[layer]) {
      layers.back().experts.push_back(raw_[layer * num_experts_ + expert]);
    }
  }
  if (layers.empty()) return "device_store: no expert stays in the file";
  try {
    files_ = std::make_unique<FileStage>(std::move(layers), num_threads, timeout_ms);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  for (int64_t layer = 0, number = 0; layer < num_layers_; ++layer) {
    if (in_file_[layer].empty()) continue;
    const uint8_t* at = files_->HalfOf(number++);
    for (const int32_t expert : in_file_[layer]) {
      table_[layer * num_experts_ + expert] = ExpertWord(at, ExpertTag::kHost, false) | kFromFile;
      at += shapes_[layer].bytes;
    }
  }
  return "";
}

void DeviceStore::StopFiles() {
  // What a stuck thread may look at stays for good.
  if (files_ != nullptr && !files_->Stop(kGrace)) static_cast<void>(files_.release());
  files_ = nullptr;
}

void DeviceStore::SetTimeout(int64_t timeout_ms) {
  if (files_ != nullptr) files_->SetTimeout(timeout_ms);
  if (peer_ != nullptr) peer_->SetTimeout(timeout_ms);
  const auto limit = static_cast<uint32_t>(std::clamp<int64_t>(timeout_ms, 1, UINT32_MAX));
  if (box_ != nullptr) __atomic_store_n(&box_->timeout_ms, limit, __ATOMIC_RELEASE);
}

void DeviceStore::StopHost() {
  if (host_ != nullptr && !host_->Stop(kGrace)) {
    // The stuck thread may look at these once more: they stay for good.
    static_cast<void>(host_.release());
    return;
  }
  host_ = nullptr;
  cudaFreeHost(box_);
  cudaFreeHost(host_rows_);
}

bool DeviceStore::aborted() const {
  return (box_ != nullptr && __atomic_load_n(&box_->aborted, __ATOMIC_ACQUIRE) != 0) ||
         (files_ != nullptr && files_->aborted());
}

bool DeviceStore::Recover() {
  if (!aborted()) return true;
  cudaDeviceSynchronize();
  if (files_ != nullptr && !files_->Recover(kGrace)) return false;
  if (!host_->Recover(kGrace)) return false;
  return cudaMemset(&doors_.mailbox.state->failed, 0, sizeof(uint32_t)) == cudaSuccess;
}

double DeviceStore::LinkSecondsPerByte() {
  const int64_t bytes =
      std::min(host_bytes_, doors_.window_rows * doors_.num_active * doors_.width * 4);
  uint8_t* scratch = nullptr;
  if (bytes == 0 || cudaMalloc(&scratch, bytes) != cudaSuccess) {
    cudaGetLastError();  // it is asked for a number, not for memory
    return 0.0;
  }
  constexpr int kCopies = 32;
  double best = 1e9;
  bool copied = true;
  for (int round = 0; round < 4 && copied; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCopies; ++i) {
      cudaMemcpyAsync(scratch, host_arena_, bytes, cudaMemcpyHostToDevice, nullptr);
    }
    copied = cudaStreamSynchronize(nullptr) == cudaSuccess;
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  cudaFree(scratch);
  return copied ? best / static_cast<double>(kCopies * bytes) : 0.0;
}

std::string DeviceStore::StartSwaps(const SwapSettings& settings) {
  if (doors() == nullptr || num_layers_ < 2 || settings.every < 1 ||
      settings.most + settings.on_peer < 1) {
    return "device_store: swaps of " + std::to_string(num_layers_) +
           " layers, expected at least 2, at least one swap a round, and open doors";
  }
  const int64_t bytes = static_cast<int64_t>(table_.size()) * 8;
  const cudaError_t error = cudaMalloc(&wanted_, bytes);
  if (error != cudaSuccess) return Failed("a second table of experts", bytes, error);
  std::vector<int64_t> slot_bytes;
  for (const ExpertShape& shape : shapes_) slot_bytes.push_back(shape.bytes);
  swaps_ = std::make_unique<DeviceSwaps>(settings, &table_, wanted_, usage_, std::move(slot_bytes),
                                         AwayTag());
  swaps_->SetFixed(lent_.Fixed(table_.size()));  // of a ring that was opened before
  return "";
}

std::string DeviceStore::AddSpares(int64_t layer, Arena arena, int64_t offset, int64_t on_host) {
  const ExpertShape* shape = GetExpertShape(layer);
  if (shape == nullptr || swaps_ == nullptr || arena == Arena::kHost) {
    return "device_store: nothing is to be swapped there";
  }
  std::string error;
  uint8_t* slot = Place(arena, offset, shape->bytes, &error);
  uint8_t* panels = Place(Arena::kHost, on_host, shape->bytes, &error);
  if (slot == nullptr || panels == nullptr) return error;
  swaps_->AddSpares(arena == Arena::kPeer ? ExpertTag::kPeer : ExpertTag::kLocal, shape->bytes,
                    slot, panels);
  return "";
}

Latch DeviceStore::LatchAfter(int64_t layer) const {
  if (wanted_ == nullptr) return {};
  const int64_t next = (layer + 1) % num_layers_ * num_experts_;
  return {wanted_ + next, experts_ + next, static_cast<int32_t>(num_experts_)};
}

std::vector<uint32_t> DeviceStore::TakeHomes() {
  std::vector<uint32_t> homes(kEntryHomes);
  if (doors() == nullptr) return homes;
  cudaDeviceSynchronize();
  cudaMemcpy(homes.data(), doors_.homes, kEntryHomes * 4, cudaMemcpyDeviceToHost);
  cudaMemset(doors_.homes, 0, kEntryHomes * 4);
  return homes;
}

}  // namespace strata
