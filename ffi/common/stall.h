// For tests: keeps a thread of ours from its next piece of work, as a machine that stopped it
// would.
//
// time_ms_ is looked at without the lock where nobody is ever stalled; all else is under mutex_.
// Ask and End may come from any thread, Pass from the one that is stalled.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace strata {

class Stall {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // The next Pass takes this long. Zero: it does not, and one under way ends. So a test can ask for
  // more than it could ever take and end it itself: it goes by events, not by the clock.
  void Ask(Milliseconds time) {
    const std::lock_guard<std::mutex> lock(mutex_);
    time_ms_.store(time.count());
    if (time.count() > 0) return;
    ++ended_;
    changed_.notify_all();
  }

  void Pass() {
    if (time_ms_.load(std::memory_order_relaxed) == 0) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const Milliseconds time(time_ms_.exchange(0));
    changed_.wait_for(lock, time, [this, before = ended_] { return ended_ != before; });
  }

 private:
  std::atomic<int64_t> time_ms_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t ended_ = 0;
};

}  // namespace strata
