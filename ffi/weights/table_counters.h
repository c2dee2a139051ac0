// What a row table did so far. Each number is exact by itself; together they are a moment's
// picture.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace strata {

struct TableCounters {
  std::atomic<int64_t> rows{0};        // asked for, repeats in a call included
  std::atomic<int64_t> cache_hits{0};  // of those: in the row cache                     (direct)
  std::atomic<int64_t> repeats{0};     // of those: read for an earlier place of the call (direct)
  std::atomic<int64_t> awaited{0};     // of those: being read by somebody else already  (direct)
  std::atomic<int64_t> reads{0};       // unbuffered reads; one serves neighbouring rows
  std::atomic<int64_t> bytes_read{0};  // by them: whole pages
  std::atomic<int64_t> wait_us{0};     // spent inside reading calls
  std::atomic<int64_t> ahead_rows{0};  // read ahead, or asked of the system in good time
  std::atomic<int64_t> ahead_dropped{0};  // not read ahead: too many at once, or the read failed

  // Where somebody looks for signs of life of the threads that read: raised with every answer of
  // the disk. Null: nobody does. What it points to outlives the table.
  std::atomic<uint64_t*> beat{nullptr};
  void Beat() {
    uint64_t* const word = beat.load(std::memory_order_relaxed);
    if (word != nullptr) __atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
  }
};

// Adds the time of its life to a counter.
class CountedTime {
 public:
  explicit CountedTime(std::atomic<int64_t>* sum_us)
      : sum_us_(sum_us), start_(std::chrono::steady_clock::now()) {}
  ~CountedTime() {
    const auto took = std::chrono::steady_clock::now() - start_;
    sum_us_->fetch_add(std::chrono::duration_cast<std::chrono::microseconds>(took).count());
  }
  CountedTime(const CountedTime&) = delete;
  CountedTime& operator=(const CountedTime&) = delete;

 private:
  std::atomic<int64_t>* sum_us_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace strata
