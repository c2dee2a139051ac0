// A thread that works beside the caller: the emulated peer, the host's own workers, the adapting
// round.
//
// Shared words and their order:
//   busy_     raised by the caller after job_ is set and lowered by the worker when the job is done
//             and destroyed, both under mutex_, so results are visible to whoever saw it lowered,
//             and what the job held is free.
//   begun_, ended_  raised by the job's threads around each piece of it (a Step). The waiter takes
//             a rise of ended_ for a sign of life; begun_ - ended_ threads are inside a piece.
//   cancelled_ raised once, by the caller, never lowered. A thread raises begun_ before it looks at
//             cancelled_, and the caller raises cancelled_ before it compares begun_ with ended_,
//             all sequentially consistent: once they are equal no piece of the job will run again.
// A wait that times out leaves the worker alone with its job: what the job points to must be owned
// by the job, or outlive the worker.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "common/stall.h"
#include "common/thread_pool.h"

namespace strata {

class TierWorker {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // `num_threads` of the pool that jobs may use, the worker's own thread included.
  explicit TierWorker(int num_threads);
  ~TierWorker();  // waits for the job
  TierWorker(const TierWorker&) = delete;
  TierWorker& operator=(const TierWorker&) = delete;

  // Starts a job; the one before must be finished.
  void Launch(std::function<void(ThreadPool&)> job);
  // Waits for the job; false after `timeout` without a sign of life. True at once if there is none.
  bool Finish(Milliseconds timeout);
  // What the finished job threw, once; null if nothing.
  std::exception_ptr TakeError();

  // One piece of a job, on any of its threads. A null worker is the caller's own thread.
  class Step {
   public:
    explicit Step(TierWorker* worker) : worker_(worker) {
      if (worker_ != nullptr) worker_->begun_.fetch_add(1);
    }
    ~Step() {
      if (worker_ != nullptr) worker_->ended_.fetch_add(1);
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    // False: the job was cancelled, its operands may be gone.
    bool wanted() const { return worker_ == nullptr || !worker_->cancelled_.load(); }

   private:
    TierWorker* worker_;
  };

  // No piece of a job begins any more.
  void Cancel() { cancelled_.store(true); }

  // Ends the thread, which takes the job under way with it; then true. False if it is stuck: after
  // `grace` outside a piece, after `most` inside one. It must then be left as it is, for good.
  bool Stop(Milliseconds grace, Milliseconds most);

  // For tests: before the next job begins, whatever happens meanwhile.
  Stall& stall() { return stall_; }

 private:
  void Loop();

  ThreadPool pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(ThreadPool&)> job_;
  std::exception_ptr error_;
  bool busy_ = false;
  bool stop_ = false;
  bool gone_ = false;  // the thread has nothing left to do
  std::atomic<int64_t> begun_{0};
  std::atomic<int64_t> ended_{0};
  std::atomic<bool> cancelled_{false};
  Stall stall_;
  std::thread thread_;
};

}  // namespace strata
