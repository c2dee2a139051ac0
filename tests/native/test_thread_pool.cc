// Tests of ffi/common/thread_pool.h: every index runs once, results are seen, nothing waits for a
// helper that sleeps. Built and run by tests/native/run; `thread` looks for races.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "common/numerics.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// Plain writes from any thread, read after Run: a race if Run did not order them.
void RunsEveryIndexOnce(int num_threads, int64_t count, int times) {
  ThreadPool pool(num_threads);
  CHECK_EQ(pool.num_threads(), num_threads);
  std::vector<int64_t> seen(count, 0);
  for (int round = 0; round < times; ++round) {
    pool.Run(count, [&](int64_t i) { seen[i] += i + round; });
  }
  const int64_t rounds = static_cast<int64_t>(times) * (times - 1) / 2;
  for (int64_t i = 0; i < count; ++i) CHECK_EQ(seen[i], i * times + rounds);
}

void TestRunsEveryIndexOnce() {
  for (const int threads : {1, 2, 3, 5}) {
    for (const int64_t count : {0, 1, 2, 3, 17, 1000}) RunsEveryIndexOnce(threads, count, 200);
  }
}

// Longer than helpers spin: they sleep, and the next job must not need them.
void TestRunsAfterItsHelpersSlept() {
  ThreadPool pool(3);
  int64_t sum = 0;
  for (int round = 0; round < 50; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round % 2 == 0 ? 300 : 90));
    std::vector<int64_t> values(8, 0);
    pool.Run(8, [&](int64_t i) { values[i] = i; });
    for (const int64_t value : values) sum += value;
  }
  CHECK_EQ(sum, int64_t{50} * 28);
}

void TestSerialisesCallersOnSeveralThreads() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4, 0);
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&pool, &sums, c] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int64_t> values(c + 1, 0);
        pool.Run(c + 1, [&](int64_t i) { values[i] = i + 1; });
        for (const int64_t value : values) sums[c] += value;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (int64_t c = 0; c < 4; ++c) CHECK_EQ(sums[c], 300 * (c + 1) * (c + 2) / 2);
}

void TestEndsWhereverItsHelpersAre() {
  for (int round = 0; round < 100; ++round) {
    ThreadPool pool(4);
    std::atomic<int64_t> ran{0};
    if (round % 3 != 0) pool.Run(round % 7, [&](int64_t) { ran.fetch_add(1); });
    CHECK_EQ(ran.load(), round % 3 != 0 ? round % 7 : 0);
    if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(150));
  }
}

// The product is subnormal: a thread that flushes gives zero.
void TestKeepsSubnormalsOnEveryThread() {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // flush to zero, subnormals are zero: as XLA's threads run
  ThreadPool pool(4);          // its helpers inherit the mode
  std::vector<float> products(64, 0.0f);
  const volatile float tiny = 0x1p-120f;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> helped{0};
  while (helped.load() < 20) {  // short jobs end before a helper comes
    pool.Run(64, [&](int64_t i) {
      products[i] = tiny * 0x1p-10f;
      if (std::this_thread::get_id() != caller) {
        helped.fetch_add(1);
        CHECK(products[i] == 0x1p-130f);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
  CHECK_EQ(_mm_getcsr() & 0x8040, 0x8040u);  // the caller's mode is its own again
  _mm_setcsr(saved);
  for (const float product : products) CHECK(product == 0x1p-130f);
#endif
}

void TestMakesOneGlobalPoolForSeveralFirstCallers() {
  std::vector<std::thread> callers;
  std::vector<ThreadPool*> pools(6, nullptr);
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&pools, c] {
      pools[c] = &ThreadPool::Global();
      std::vector<int64_t> values(5, 0);
      pools[c]->Run(5, [&](int64_t i) { values[i] = i; });
      CHECK_EQ(values[4], 4);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const ThreadPool* pool : pools) CHECK(pool == pools[0]);
}

void TestReplacesTheGlobalPool() {
  for (const int threads : {3, 1, 2, 0, -5}) {
    ThreadPool::SetThreads(threads);
    CHECK_EQ(ThreadPool::Global().num_threads(), threads < 1 ? 1 : threads);
    std::atomic<int64_t> sum{0};
    ThreadPool::Global().Run(10, [&](int64_t i) { sum.fetch_add(i); });
    CHECK_EQ(sum.load(), int64_t{45});
  }
}

// From the caller's thread or a helper's: it comes out of Run, and the next job is as any other.
void TestPassesOnWhatABodyThrows() {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      bool thrown = false;
      try {
        pool.Run(64, [&](int64_t i) {
          if (i % 7 == round % 7) throw std::bad_alloc();
        });
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      CHECK(thrown);
      std::atomic<int64_t> sum{0};
      pool.Run(64, [&](int64_t i) { sum.fetch_add(i); });
      CHECK_EQ(sum.load(), int64_t{63} * 32);
    }
  }
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestMakesOneGlobalPoolForSeveralFirstCallers);  // first: nobody has made it yet
  RUN(TestRunsEveryIndexOnce);
  RUN(TestRunsAfterItsHelpersSlept);
  RUN(TestSerialisesCallersOnSeveralThreads);
  RUN(TestEndsWhereverItsHelpersAre);
  RUN(TestKeepsSubnormalsOnEveryThread);
  RUN(TestPassesOnWhatABodyThrows);
  RUN(TestReplacesTheGlobalPool);
  return 0;
}
