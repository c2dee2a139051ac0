// A thread that works through rows wanted later. It starts with the first row pushed.
//
// Shared: waiting_, stop_ and thread_ under mutex_. The body runs without the mutex, on the queue's
// thread only, and has returned before the destructor does. The thread's own wait has no time-out:
// no answer depends on it, and the destructor ends it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>

namespace strata {

class AheadQueue {
 public:
  using Body = std::function<void(std::span<const int64_t>)>;

  // Calls the body with up to `chunk` rows at a time; keeps at most `limit` waiting.
  AheadQueue(Body body, int64_t chunk, int64_t limit)
      : body_(std::move(body)), chunk_(chunk), limit_(limit) {}
  ~AheadQueue();  // forgets what waits
  AheadQueue(const AheadQueue&) = delete;
  AheadQueue& operator=(const AheadQueue&) = delete;

  // Returns at once: how many of the rows, from the first on, were taken.
  int64_t Push(std::span<const int64_t> rows);

 private:
  void Work();

  const Body body_;
  const int64_t chunk_;
  const int64_t limit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<int64_t> waiting_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace strata
