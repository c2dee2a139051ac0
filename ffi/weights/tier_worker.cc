#include "weights/tier_worker.h"

#include <utility>

#include "common/numerics.h"

namespace strata {

TierWorker::TierWorker(int num_threads) : thread_([this, num_threads] { Loop(num_threads); }) {}

TierWorker::~TierWorker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void TierWorker::Launch(std::function<void(ThreadPool&)> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = std::move(job);
    busy_ = true;
  }
  changed_.notify_all();
}

bool TierWorker::Finish(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return !busy_; });
}

void TierWorker::Loop(int num_threads) {
  const FloatMode mode;  // threads started in here inherit it
  ThreadPool pool(num_threads < 1 ? 1 : num_threads);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stop_; });
    if (!busy_) return;
    std::function<void(ThreadPool&)> job = std::move(job_);
    lock.unlock();
    job(pool);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace strata
