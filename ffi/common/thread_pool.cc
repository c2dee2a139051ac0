#include "common/thread_pool.h"

#include <memory>
#include <utility>

#include "common/numerics.h"

namespace strata {
namespace {

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

std::unique_ptr<ThreadPool>& Slot() {
  // Never destroyed: a helper must not outlive the pool at process exit.
  static auto* pool = new std::unique_ptr<ThreadPool>();
  return *pool;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::chrono::microseconds spin) : spin_(spin) {
  try {
    for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { Help(); });
  } catch (...) {  // the system has no more threads to give; those started must end first
    Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::Work() {
  try {
    for (int64_t begin = next_.fetch_add(run_); begin < count_; begin = next_.fetch_add(run_)) {
      const int64_t end = begin + run_ < count_ ? begin + run_ : count_;
      for (int64_t i = begin; i < end; ++i) (*body_)(i);
    }
  } catch (...) {
    next_.store(count_);  // the others take nothing new
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::Run(int64_t count, const std::function<void(int64_t)>& body, int64_t run) {
  const FloatMode mode;
  if (count <= 1 || helpers_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard<std::mutex> lock(job_mutex_);
  body_ = &body;
  count_ = count;
  // Eight: few enough for runs to be long, many enough to even out the end.
  run_ = run > 0 ? run : count / (8 * num_threads()) + 1;
  next_.store(0);
  const uint64_t open = job_.load() + 1;
  job_.store(open);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
    wake_.notify_all();
  }
  Work();
  job_.store(open + 1);
  while (active_.load() > 0) Pause();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::Help() {
  const FloatMode mode;
  uint64_t done = 0;  // the last job this thread took part in
  const auto waiting = [&] {
    const uint64_t job = job_.load();
    return (job % 2 == 0 || job == done) && !stop_;
  };
  while (true) {
    const auto deadline = std::chrono::steady_clock::now() + spin_;
    while (waiting()) {
      for (int i = 0; i < 32 && waiting(); ++i) Pause();
      if (std::chrono::steady_clock::now() < deadline) continue;
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return !waiting(); });
      sleepers_.fetch_sub(1);
    }
    if (stop_) return;
    active_.fetch_add(1);
    const uint64_t job = job_.load();
    if (job % 2 == 1) {
      Work();
      done = job;
    }
    active_.fetch_sub(1);
  }
}

ThreadPool& ThreadPool::Global() {
  // Two programs may run their first op at once.
  static const bool started = [] {
    const unsigned cores = std::thread::hardware_concurrency();
    if (!Slot()) SetThreads(cores > 0 ? static_cast<int>(cores) : 1);
    return true;
  }();
  static_cast<void>(started);
  return *Slot();
}

void ThreadPool::SetThreads(int num_threads) {
  Slot() = std::make_unique<ThreadPool>(num_threads < 1 ? 1 : num_threads);
}

}  // namespace strata
