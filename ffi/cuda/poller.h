// The host's thread that looks at a bell (bell.h) and answers what is rung there.
//
// It spins while windows follow one another and for kLinger after the last sign of one; then it
// sleeps, and looks every few milliseconds, should a step come unannounced. It makes no CUDA call.
//
// Threads: Wake, Stop, Recover and stall() from any; the answer runs on the poller's own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "common/stall.h"
#include "cuda/bell.h"

namespace strata {

class Poller {
 public:
  // Windows follow one another within this; a thread that sleeps takes as long to wake as a letter.
  static constexpr std::chrono::microseconds kLinger{3000};

  // `answer` is called with every new epoch, and not where the device has given up. `bell`, zero
  // throughout, and what the answer uses outlive the poller.
  Poller(Bell* bell, std::function<void(uint64_t)> answer);
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Windows are about to come.
  void Wake();
  // After an abort, with no step under way: waits for the answer under way to end and makes the
  // bell fit for use. False if it has not ended within `grace`.
  bool Recover(std::chrono::milliseconds grace);
  // Ends the thread, once; false if it is stuck. Then the object must be kept for good.
  bool Stop(std::chrono::milliseconds grace);

  // A sign of life.
  void Beat() { __atomic_fetch_add(&bell_->beat, 1, __ATOMIC_RELAXED); }
  // Whether nobody waits for an answer any more.
  bool Aborted() const {
    return __atomic_load_n(&bell_->aborted, __ATOMIC_RELAXED) != 0 || stop_.load();
  }
  // For tests: before the next letter is looked at.
  Stall& stall() { return stall_; }

 private:
  void Loop();
  void Answer(uint64_t epoch);

  Bell* const bell_;
  const std::function<void(uint64_t)> answer_;
  Stall stall_;
  std::atomic<int64_t> wakes_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  bool gone_ = false;  // under sleep_mutex_
  std::thread thread_;
};

}  // namespace strata
