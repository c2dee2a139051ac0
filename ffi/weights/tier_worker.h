// A thread that works beside the caller: the emulated peer, the host's own workers, the adapting
// round.
//
// One job at a time. `busy_` is raised by the caller after job_ is set and lowered by the worker
// when the job is done, both under mutex_, so results are visible to whoever saw it lowered. A wait
// that times out leaves the worker alone with its job: what the job points to must outlive it
// (workspaces are never freed).
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "common/thread_pool.h"

namespace strata {

class TierWorker {
 public:
  // `num_threads` of the pool that jobs may use, the worker's own thread included.
  explicit TierWorker(int num_threads);
  ~TierWorker();
  TierWorker(const TierWorker&) = delete;
  TierWorker& operator=(const TierWorker&) = delete;

  // Starts a job; the one before must be finished.
  void Launch(std::function<void(ThreadPool&)> job);
  // Waits for the job; false after `timeout`. True at once if there is none.
  bool Finish(std::chrono::milliseconds timeout);

 private:
  void Loop(int num_threads);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(ThreadPool&)> job_;
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace strata
