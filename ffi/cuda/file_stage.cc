#include "cuda/file_stage.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cuda/panels.h"
#include "cuda/will_need.h"

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Between two looks: a layer's panels take far longer.
constexpr std::chrono::microseconds kLook{200};

}  // namespace

FileStage::FileStage(std::vector<Layer> layers, int num_threads, int64_t timeout_ms)
    : layers_(std::move(layers)), pool_(num_threads) {
  for (const Layer& layer : layers_) {
    const auto count = static_cast<int64_t>(layer.experts.size());
    half_bytes_ = std::max(half_bytes_, count * layer.shape.bytes);
  }
  void* box = nullptr;
  void* seen = nullptr;
  const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
  cudaError_t error = cudaHostAlloc(&box, sizeof(StageBox), flags);
  if (error == cudaSuccess) {
    std::memset(box, 0, sizeof(StageBox));
    box_ = static_cast<StageBox*>(box);
    error = cudaHostGetDevicePointer(&seen, box, 0);
    at_.box = static_cast<StageBox*>(seen);
  }
  const auto bytes = static_cast<size_t>(2 * half_bytes_);
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&memory_), bytes, flags);
  }
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&seen, memory_, 0);
  seen_ = static_cast<uint8_t*>(seen);
  if (error == cudaSuccess) error = cudaMalloc(&at_.state, sizeof(BellState));
  if (error == cudaSuccess) error = cudaMemset(at_.state, 0, sizeof(BellState));
  if (error != cudaSuccess) {
    cudaGetLastError();  // what was answered is no error of a later call
    cudaFree(at_.state);
    cudaFreeHost(memory_);
    cudaFreeHost(box_);
    throw std::runtime_error("device_store: " + std::to_string(bytes) +
                             " bytes of page-locked memory for experts in the file are not to be "
                             "had (" +
                             cudaGetErrorString(error) + ")");
  }
  SetTimeout(timeout_ms);
  thread_ = std::thread([this] { Loop(); });
}

FileStage::~FileStage() {
  cudaFree(at_.state);
  cudaFreeHost(memory_);
  cudaFreeHost(box_);
}

void FileStage::SetTimeout(int64_t timeout_ms) {
  const auto limit = static_cast<uint32_t>(std::clamp<int64_t>(timeout_ms, 1, UINT32_MAX));
  __atomic_store_n(&box_->timeout_ms, limit, __ATOMIC_RELEASE);
}

bool FileStage::Stop(milliseconds grace) {
  stop_.store(true);
  const auto deadline = Clock::now() + grace;
  while (!gone_.load()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

bool FileStage::Recover(milliseconds grace) {
  const auto deadline = Clock::now() + grace;
  while (busy_.load()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (cudaMemset(&at_.state->failed, 0, sizeof(uint32_t)) != cudaSuccess) return false;
  __atomic_store_n(&box_->aborted, 0, __ATOMIC_RELEASE);
  return true;
}

// Whether the turn's panels may be made now.
bool FileStage::Ready(uint64_t turn) const {
  const uint64_t wanted = __atomic_load_n(&box_->wanted, __ATOMIC_ACQUIRE);
  const uint64_t over = __atomic_load_n(&box_->doorbell, __ATOMIC_ACQUIRE);
  const uint64_t half = (turn - 1) % layers_.size() % 2;
  return turn <= wanted + 1 && last_[half] <= over;
}

void FileStage::Loop() {
  uint64_t done = 0;
  while (!stop_.load()) {
    __atomic_fetch_add(&box_->beat, 1, __ATOMIC_RELAXED);
    // Of a step that was given up some turns are over that were never made.
    done = std::max(done, __atomic_load_n(&box_->doorbell, __ATOMIC_ACQUIRE));
    const bool aborted = this->aborted();
    if (aborted || !Ready(done + 1)) {
      std::this_thread::sleep_for(kLook);
      continue;
    }
    busy_.store(true);
    if (Make(done + 1)) __atomic_store_n(&box_->done, ++done, __ATOMIC_RELEASE);
    busy_.store(false);
  }
  gone_.store(true);
}

// False where the device gave up meanwhile.
bool FileStage::Make(uint64_t turn) {
  const auto number = static_cast<int64_t>((turn - 1) % layers_.size());
  const int64_t half = number % 2;
  last_[half] = turn;
  if (holds_[half] == number) return true;
  holds_[half] = -1;
  const Layer& layer = layers_[number];
  const ExpertShape& shape = layer.shape;
  for (const ExpertBytes& raw : layer.experts) WillNeed(shape.gate, shape.up, shape.down, raw);
  const auto pack = [&](int64_t i) {
    uint8_t* to = memory_ + half * half_bytes_ + i * shape.bytes;
    const auto part = [&](const DeviceMatrix& m, const uint8_t* raw, int64_t at) {
      if (stop_.load() || aborted()) return;
      const PanelShape panels = ShapeOfPanels(*m.type, m.rows, m.cols);
      PackPanels(*m.type, panels, raw, 0, panels.num_panels, to + at);
      __atomic_fetch_add(&box_->beat, 1, __ATOMIC_RELAXED);
    };
    part(shape.gate, layer.experts[i].gate, 0);
    part(shape.up, layer.experts[i].up, shape.up_at);
    part(shape.down, layer.experts[i].down, shape.down_at);
  };
  pool_.Run(static_cast<int64_t>(layer.experts.size()), pack, 1);
  if (stop_.load() || aborted()) return false;
  holds_[half] = number;
  return true;
}

}  // namespace strata
