// A small pool for the host ops: the calling thread works too, and helpers spin briefly between
// jobs.
//
// Shared words, and who may write them:
//   job_     2 * number of the job + 1 while it takes helpers, 2 * number afterwards. Caller only.
//   It is
//            raised after body_, count_ and next_ are set, so a helper that sees it odd sees the
//            job.
//   next_    fetch_add by everybody: each index goes to exactly one thread.
//   active_  helpers raise it before they look at job_ and lower it when they are out. The caller
//            closes the job, then waits for zero. All three accesses are sequentially consistent:
//            either the helper sees the closed job, or the caller sees the helper. So body_ may
//            live on the caller's stack, results are visible after Run, and a helper that sleeps
//            delays nobody.
// One job at a time: callers on different threads are serialised by job_mutex_.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace strata {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread. Helpers spin for `spin` after a job before they sleep.
  explicit ThreadPool(int num_threads, std::chrono::microseconds spin = kSpin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs body(i) for every i in [0, count), on any thread; returns when all are done. A thread
  // takes runs of consecutive indices, so that neighbours in memory mostly fall to one thread. The
  // body must not call Run. Runs with the float mode of numerics.h on every thread. What a body
  // throws comes out of here, the first such thing, when no thread works any more; indices may then
  // be left out. `run`: how many; 0 = some eight runs a thread.
  void Run(int64_t count, const std::function<void(int64_t)>& body, int64_t run = 0);

  int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // The pool that ops use. SetThreads replaces it; call it while no op runs.
  static ThreadPool& Global();
  static void SetThreads(int num_threads);

 private:
  // A decode step calls an op every few tens of microseconds; waking a sleeping thread costs about
  // as much as a small op. Longer than this the core is better left to XLA's own threads.
  static constexpr std::chrono::microseconds kSpin{100};

  void Stop();
  void Help();
  void Work();

  const std::chrono::microseconds spin_;
  std::vector<std::thread> helpers_;
  std::mutex job_mutex_;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0;
  int64_t run_ = 1;  // consecutive indices taken at once
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int> active_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;  // the first that a body of this job threw
};

}  // namespace strata
