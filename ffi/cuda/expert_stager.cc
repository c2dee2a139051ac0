#include "cuda/expert_stager.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/current_device.h"

namespace strata {

ExpertStager::ExpertStager(int64_t buffer_bytes, int num_threads, Work work, uint64_t* beat)
    : work_(std::move(work)),
      beat_(beat),
      buffer_bytes_(buffer_bytes),
      landed_(kBuffers),
      pool_(num_threads) {
  cudaGetDevice(&device_);
  const int64_t bytes = PinnedBytes(buffer_bytes);
  cudaError_t error =
      cudaHostAlloc(reinterpret_cast<void**>(&memory_), bytes, cudaHostAllocDefault);
  for (cudaEvent_t& event : landed_) {
    if (error == cudaSuccess) {
      error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
    }
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // what was answered is no error of a later call
    Release();
    throw std::runtime_error("expert_stager: " + std::to_string(bytes >> 20) +
                             " MiB of page-locked memory are not to be had (" +
                             cudaGetErrorString(error) + ")");
  }
  thread_ = std::thread([this] { Loop(); });
}

ExpertStager::~ExpertStager() {
  Halt();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  Release();
}

void ExpertStager::Release() {
  for (const cudaEvent_t event : landed_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaFreeHost(memory_);
}

void ExpertStager::Raise(uint64_t target) {
  const std::lock_guard<std::mutex> lock(mutex_);
  target_ = target;
  changed_.notify_all();
}

const uint8_t* ExpertStager::Await(uint64_t n) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    // The issuer went past these without asking.
    while (!made_.empty() && made_.front().n < n) {
      made_.pop_front();
      ++over_;
      changed_.notify_all();
    }
    if (halted_) return nullptr;
    if (!made_.empty() && made_.front().n == n) break;
    if (next_ > n) return nullptr;
    changed_.wait(lock);
  }
  return memory_ + made_.front().buffer * buffer_bytes_;
}

cudaError_t ExpertStager::Taken(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (made_.empty()) return cudaSuccess;  // halted meanwhile, which waits for the stream
  const cudaError_t error = cudaEventRecord(landed_[made_.front().buffer], stream);
  made_.pop_front();
  ++over_;
  changed_.notify_all();
  return error;
}

void ExpertStager::Halt() {
  std::unique_lock<std::mutex> lock(mutex_);
  halted_ = true;
  abandon_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !busy_; });
  made_.clear();
  next_ = target_ = 0;
  begun_ = over_ = 0;
}

void ExpertStager::Resume() {
  const std::lock_guard<std::mutex> lock(mutex_);
  halted_ = false;
  abandon_ = false;
}

void ExpertStager::Loop() {
  const CurrentDevice current(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] {
      return stop_ || (!halted_ && next_ < target_ && begun_ - over_ < kBuffers);
    });
    if (stop_) return;
    busy_ = true;
    std::vector<Made> batch;
    const uint64_t next = Collect(&batch);
    lock.unlock();
    Produce(batch);
    lock.lock();
    busy_ = false;
    if (!halted_) {
      made_.insert(made_.end(), batch.begin(), batch.end());
      begun_ += static_cast<int64_t>(batch.size());
      next_ = next;
    }
    changed_.notify_all();
  }
}

// Those that there are buffers for; returns the entry behind the last one looked at.
uint64_t ExpertStager::Collect(std::vector<Made>* batch) const {
  uint64_t next = next_;
  const int64_t most = std::min(kAtOnce, kBuffers - (begun_ - over_));
  while (next < target_ && static_cast<int64_t>(batch->size()) < most) {
    const uint64_t n = next++;
    if (!work_.is_wanted(n)) continue;
    batch->push_back({n, (begun_ + static_cast<int64_t>(batch->size())) % kBuffers});
  }
  return next;
}

void ExpertStager::Produce(const std::vector<Made>& batch) {
  // A copy that failed is told of by the issuer's stream.
  for (const Made& made : batch) cudaEventSynchronize(landed_[made.buffer]);
  pool_.Run(
      static_cast<int64_t>(batch.size()) * kParts,
      [&](int64_t i) {
        if (abandon_) return;
        const Made& made = batch[i / kParts];
        work_.make(made.n, i % kParts, memory_ + made.buffer * buffer_bytes_);
        __atomic_fetch_add(beat_, 1, __ATOMIC_RELAXED);
      },
      1);
}

}  // namespace strata
