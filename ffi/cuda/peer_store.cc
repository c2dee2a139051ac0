#include "cuda/peer_store.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "cuda/current_device.h"

namespace strata {
namespace {

int64_t WorkspaceBytes(const PeerSizes& sizes) {
  return ExpertFfnWorkspace(sizes.max_rows, sizes.num_active, sizes.num_experts, sizes.width,
                            sizes.hidden);
}

// Of a card's multiprocessors, two or more; at least one is left.
int PartOf(int multiprocessors, int part, int of) {
  return std::clamp(multiprocessors * part / of, 1, multiprocessors - 1);
}

}  // namespace

PeerStore::PeerStore(int device, bool through_host, const PeerSizes& sizes)
    : primary_(0),
      through_host_(through_host),
      sizes_(sizes),
      branch_("peer", device, WorkspaceBytes(sizes)) {
  cudaGetDevice(&primary_);
  std::string error = AllocateOnPrimary();
  if (error.empty()) {
    const CurrentDevice current(device);
    error = current.problem().empty() ? AllocateOnPeer() : "peer: " + current.problem();
  }
  if (error.empty()) return;
  Release();
  throw std::runtime_error(error);
}

PeerStore::~PeerStore() { Release(); }

std::string PeerStore::AllocateOnPrimary() {
  cudaError_t error = cudaSuccess;
  const int64_t x_bytes = sizes_.max_rows * sizes_.width * 4;
  const int64_t row_bytes = x_bytes * sizes_.num_active;
  if (!through_host_) {
    error = cudaMalloc(&rows_, row_bytes);
    if (error != cudaSuccess) return branch_.Short("memory for rows", row_bytes, error);
    return AllocateBell();
  }
  const auto pinned = [&](auto** address, int64_t bytes) {
    if (error == cudaSuccess) {
      error = cudaHostAlloc(reinterpret_cast<void**>(address), bytes,
                            cudaHostAllocMapped | cudaHostAllocPortable);
    }
  };
  pinned(&on_host_.x, x_bytes);
  pinned(&on_host_.words, sizes_.max_rows * sizes_.num_active * 8);
  pinned(&on_host_.live, 4);
  pinned(&rows_, row_bytes);
  return error == cudaSuccess ? "" : branch_.Failed("page-locked memory for rows", error);
}

std::string PeerStore::AllocateBell() {
  constexpr int64_t kTimeoutMs = 10000;
  cudaError_t error = cudaMalloc(&bell_.news, sizeof(PeerNews));
  if (error == cudaSuccess) error = cudaMemset(bell_.news, 0, sizeof(PeerNews));
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&bell_.limit), sizeof(PeerLimit),
                          cudaHostAllocMapped | cudaHostAllocPortable);
  }
  if (error != cudaSuccess) return branch_.Failed("memory for its bell", error);
  *bell_.limit = {};
  SetTimeout(kTimeoutMs);
  return "";
}

std::string PeerStore::AllocateOnPeer() {
  cudaError_t error = cudaSuccess;
  std::string problem;
  const auto take = [&](const char* what, auto** address, int64_t bytes) {
    if (error != cudaSuccess || bytes == 0) return;
    error = cudaMalloc(address, bytes);
    if (error != cudaSuccess) problem = branch_.Short(what, bytes, error);
  };
  take("memory for a window's rows", &inputs_.x, sizes_.max_rows * sizes_.width * 4);
  const int64_t entries = sizes_.max_rows * sizes_.num_active;
  take("memory for a window's words", &inputs_.words, entries * 8);
  take("memory for a window's entries", &entries_, entries * 4);
  take("memory for a window's size", &inputs_.live, 4);
  if (bell_.news != nullptr) take("memory for its bell", &bell_.turn, sizeof(PeerTurn));
  take("the experts' arena", &arena_, sizes_.expert_bytes);
  if (!problem.empty()) return problem;
  if (bell_.turn != nullptr) error = cudaMemset(bell_.turn, 0, sizeof(PeerTurn));
  // No row is live before the first window.
  if (error == cudaSuccess) error = cudaMemset(inputs_.live, 0, 4);
  std::vector<int32_t> numbers(entries);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (error == cudaSuccess) {
    error = cudaMemcpy(entries_, numbers.data(), entries * 4, cudaMemcpyHostToDevice);
  }
  return error == cudaSuccess ? "" : branch_.Failed("the first write", error);
}

void PeerStore::Release() {
  tiles_ = nullptr;
  attention_ = nullptr;
  timeline_ = nullptr;
  const CurrentDevice current(device());
  if (current.problem().empty()) {
    cudaDeviceSynchronize();  // a step may still be in flight
  }
  for (void* memory : {static_cast<void*>(arena_), static_cast<void*>(entries_),
                       static_cast<void*>(inputs_.x), static_cast<void*>(inputs_.words),
                       static_cast<void*>(inputs_.live), static_cast<void*>(bell_.turn)}) {
    cudaFree(memory);
  }
  if (!through_host_) {
    cudaFree(rows_);
    cudaFree(bell_.news);
    cudaFreeHost(bell_.limit);
    return;
  }
  for (void* memory : {static_cast<void*>(rows_), static_cast<void*>(on_host_.x),
                       static_cast<void*>(on_host_.words), static_cast<void*>(on_host_.live)}) {
    cudaFreeHost(memory);
  }
}

std::string PeerStore::OpenTiles(const PeerTileSizes& sizes) {
  if (!is_reached() || tiles_ != nullptr) {
    return "peer: it computes rows of prompts only where devices reach each other's memory";
  }
  try {
    tiles_ = std::make_unique<PeerTiles>(device(), sizes);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string PeerStore::OpenAttention(const PeerAttentionSizes& sizes) {
  if (!is_reached() || attention_ != nullptr) {
    return "peer: it takes rows of attention only where devices reach each other's memory";
  }
  try {
    attention_ = std::make_unique<PeerAttention>(device(), sizes);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string PeerStore::OpenTimeline(int64_t capacity) {
  const CurrentDevice current(device());
  try {
    timeline_ = std::make_unique<Timeline>(capacity);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  if (tiles_ != nullptr) tiles_->SetTimeline(timeline_->at());
  if (attention_ != nullptr) attention_->SetTimeline(timeline_->at());
  return "";
}

std::vector<std::pair<uint64_t, uint64_t>> PeerStore::TakeTimeline() {
  if (timeline_ == nullptr) return {};
  const CurrentDevice current(device());
  return timeline_->Take();
}

std::string PeerStore::ShareCard(ExpertFfnArgs* window) const {
  if (bell_.news == nullptr) return "";
  ExpertFfnArgs told = *window;
  if (!is_elsewhere()) {
    if (Multiprocessors() < 2) return "";
    // The primary waits for the peer, and not the other way round. So the peer has more than its
    // part: the shared expert is the primary's besides about half of the others.
    told.most_blocks[0] = PartOf(Multiprocessors(), 8, 15);
    told.most_blocks[1] = PartOf(Multiprocessors(), 2, 5);
  }
  if (DownBlocks(told) == 0) return "";
  {
    const CurrentDevice current(device());
    if (!current.problem().empty()) return "peer: " + current.problem();
    const int64_t tellers = DownBlocks(ArgsOf(told, inputs_.inputs()));
    if (tellers == 0 || tellers > kMostTellers) return "";
    told.bell = bell_;
    told.bell.tellers = static_cast<int32_t>(tellers);
  }
  *window = told;
  return "";
}

void PeerStore::SetTimeout(int64_t timeout_ms) {
  if (bell_.limit == nullptr) return;
  const auto limit = static_cast<uint32_t>(std::clamp<int64_t>(timeout_ms, 1, UINT32_MAX));
  __atomic_store_n(&bell_.limit->timeout_ms, limit, __ATOMIC_RELEASE);
}

bool PeerStore::aborted() const {
  return bell_.limit != nullptr && __atomic_load_n(&bell_.limit->aborted, __ATOMIC_ACQUIRE) != 0;
}

void PeerStore::LoseRows(int64_t timeout_ms) {
  if (bell_.news == nullptr) return;
  SetTimeout(timeout_ms);
  uint64_t awaited = 0;
  cudaMemcpy(&awaited, &bell_.news->awaited, 8, cudaMemcpyDeviceToHost);
  ++awaited;
  cudaMemcpy(&bell_.news->awaited, &awaited, 8, cudaMemcpyHostToDevice);
}

std::string PeerStore::Recover() {
  if (!aborted()) return "";
  cudaError_t error = cudaDeviceSynchronize();  // a step may still be queued
  const auto here = [&](void* words, size_t bytes) {
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaMemset(words, 0, bytes);
    // No step may begin before: its streams do not wait for this one.
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
  };
  {
    const CurrentDevice current(device());
    here(bell_.turn, sizeof(PeerTurn));
  }
  here(bell_.news, sizeof(PeerNews));
  if (error != cudaSuccess) return branch_.Failed("its bell", error);
  __atomic_store_n(&bell_.limit->aborted, 0u, __ATOMIC_RELEASE);
  return "";
}

std::string PeerStore::Fork(const ExpertFfnArgs& window, cudaStream_t stream) {
  if (window.num_rows > sizes_.max_rows || window.num_active != sizes_.num_active ||
      window.width != sizes_.width) {
    return "peer: " + std::to_string(window.num_rows) + " rows of " + std::to_string(window.width) +
           " with " + std::to_string(window.num_active) + " experts, it has room for " +
           std::to_string(sizes_.max_rows) + " of " + std::to_string(sizes_.width) + " with " +
           std::to_string(sizes_.num_active);
  }
  const auto copy = [&](const WindowInputs& from, bool near, const WindowRoom& to,
                        cudaStream_t on) {
    return CopyInputs(from, near, to, window.num_rows, window.num_active, window.width, on);
  };
  WindowInputs from = {window.x, window.experts, window.ids, window.live};
  if (through_host_) {
    const std::string error = copy(from, true, on_host_, stream);
    if (!error.empty()) return error;
    from = on_host_.inputs();
  }
  std::string error = branch_.Fork(stream);
  if (!error.empty()) return error;
  const CurrentDevice current(device());
  if (!IsNear()) {
    error = copy(from, false, inputs_, branch_.stream());
    if (!error.empty()) return error;
    from = inputs_.inputs();
  }
  error = Compute(window, from);
  return error.empty() ? branch_.End() : error;
}

ExpertFfnArgs PeerStore::ArgsOf(const ExpertFfnArgs& window, const WindowInputs& inputs) const {
  ExpertFfnArgs args = window;
  args.x = inputs.x;
  args.ids = inputs.ids == nullptr ? entries_ : inputs.ids;
  args.live = inputs.live;
  args.experts = inputs.words;
  args.workspace = branch_.memory();
  args.rows = rows_;
  args.weights = args.shared_weights = nullptr;
  args.y = nullptr;
  args.usage = nullptr;  // the primary counts
  args.doors = true;
  args.peer_rows = nullptr;  // the bell is the window's
  args.homes = nullptr;
  args.mailbox = {};
  args.latch = {};
  for (int64_t& most : args.most_blocks) {
    if (most > 0) most = Multiprocessors() - most;
  }
  return args;
}

std::string PeerStore::Compute(const ExpertFfnArgs& window, const WindowInputs& inputs) {
  const ExpertFfnArgs args = ArgsOf(window, inputs);
  const std::string error = ExpertGateUp(args, branch_.stream());
  return error.empty() ? ExpertDown(args, branch_.stream()) : error;
}

std::string PeerStore::Warm(const ExpertFfnArgs& window) {
  const CurrentDevice current(device());
  std::string error = CopyInputs(inputs_.inputs(), true, inputs_, window.num_rows,
                                 window.num_active, window.width, branch_.stream());
  if (error.empty()) error = Compute(window, inputs_.inputs());
  if (!error.empty()) return error;
  const cudaError_t done = cudaStreamSynchronize(branch_.stream());
  return done == cudaSuccess ? "" : branch_.Failed("its kernels", done);
}

}  // namespace strata
