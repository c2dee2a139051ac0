#include "weights/tier_worker.h"

#include <algorithm>
#include <utility>

#include "common/numerics.h"

namespace strata {
namespace {

// How often a wait looks for signs of life: what it may be late by.
constexpr int kLooks = 16;

}  // namespace

TierWorker::TierWorker(int num_threads)
    : pool_(std::max(1, num_threads)), thread_([this] { Loop(); }) {}

TierWorker::~TierWorker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void TierWorker::Launch(std::function<void(ThreadPool&)> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = std::move(job);
    busy_ = true;
  }
  changed_.notify_all();
}

bool TierWorker::Finish(Milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [this] { return !busy_; };
  if (done()) return true;
  int64_t seen = ended_.load();
  auto deadline = Clock::now() + timeout;
  while (true) {
    const auto look = Clock::now() + timeout / kLooks + Milliseconds(1);
    if (changed_.wait_until(lock, std::min(look, deadline), done)) return true;
    const int64_t ended = ended_.load();
    if (ended != seen) {
      seen = ended;
      deadline = Clock::now() + timeout;
    } else if (Clock::now() >= deadline) {
      return false;
    }
  }
}

std::exception_ptr TierWorker::TakeError() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(error_, nullptr);
}

bool TierWorker::Stop(Milliseconds grace, Milliseconds most) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  stop_ = true;
  changed_.notify_all();
  while (!changed_.wait_for(lock, Milliseconds(10), [this] { return gone_; })) {
    const auto waited = std::chrono::steady_clock::now() - start;
    const bool inside = begun_.load() != ended_.load();
    if (waited >= (inside ? std::max(grace, most) : grace)) return false;
  }
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  return true;
}

void TierWorker::Loop() {
  const FloatMode mode;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stop_; });
    if (!busy_) break;
    std::function<void(ThreadPool&)> job = std::move(job_);
    lock.unlock();
    stall_.Pass();
    std::exception_ptr error;
    try {
      job(pool_);
    } catch (...) {
      error = std::current_exception();
    }
    job = nullptr;  // what it owns is free before anybody sees that it is done
    lock.lock();
    error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
  gone_ = true;
  changed_.notify_all();
}

}  // namespace strata
