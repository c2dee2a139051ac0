// Tests of ffi/weights/tier_worker.h: waits end, signs of life count, what a lost job held is
// known. Built and run by tests/native/run; `thread` looks for races.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "weights/tier_worker.h"

namespace strata {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::hours kForGood{1};  // until the test ends it
constexpr std::chrono::minutes kSoon{1};   // on a machine with much other work

int64_t MillisecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start).count();
}

void TestRunsJobsOneAfterTheOther() {
  TierWorker worker(2);
  CHECK(worker.Finish(milliseconds(0)));  // there is none
  int64_t sum = 0;
  for (int64_t i = 0; i < 200; ++i) {
    worker.Launch([&sum, i](ThreadPool& pool) {
      std::atomic<int64_t> part{0};
      pool.Run(4, [&](int64_t j) { part.fetch_add(i * j); });
      sum += part.load();
    });
    CHECK(worker.Finish(kSoon));
  }
  CHECK_EQ(sum, int64_t{6} * 199 * 100);
}

// Longer than the time-out in all, but never silent that long.
void TestWaitsForAWorkerThatMoves() {
  TierWorker worker(1);
  worker.Launch([&](ThreadPool&) {
    for (int i = 0; i < 60; ++i) {
      const TierWorker::Step step(&worker);
      CHECK(step.wanted());
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  const auto start = std::chrono::steady_clock::now();
  CHECK(worker.Finish(milliseconds(1000)));
  CHECK(MillisecondsSince(start) >= 1100);
}

void TestGivesUpASilentWorkerInTime() {
  TierWorker worker(1);
  worker.stall().Ask(kForGood);
  bool ran = false;
  worker.Launch([&](ThreadPool&) { ran = true; });
  const auto start = std::chrono::steady_clock::now();
  CHECK(!worker.Finish(milliseconds(100)));
  CHECK(MillisecondsSince(start) >= 100);
  worker.stall().Ask({});
  CHECK(worker.Finish(kSoon));  // it was only late
  CHECK(ran);
}

// The job's own hold ends before the job counts as done, and not before.
void TestHoldsWhatTheJobHolds() {
  TierWorker worker(1);
  auto held = std::make_shared<int>(1);
  worker.stall().Ask(kForGood);
  worker.Launch([held](ThreadPool&) {});
  CHECK(!worker.Finish(milliseconds(20)));
  CHECK_EQ(held.use_count(), 2);
  worker.stall().Ask({});
  CHECK(worker.Finish(kSoon));
  CHECK_EQ(held.use_count(), 1);
}

void TestBeginsNothingOnceCancelled() {
  TierWorker worker(2);
  worker.stall().Ask(kForGood);
  std::atomic<int> pieces{0};
  worker.Launch([&](ThreadPool& pool) {
    pool.Run(50, [&](int64_t) {
      const TierWorker::Step step(&worker);
      if (step.wanted()) ++pieces;
    });
  });
  worker.Cancel();
  worker.stall().Ask({});
  CHECK(worker.Stop(kSoon, kSoon));
  CHECK_EQ(pieces.load(), 0);
}

// Outside a piece it is left alone soon, in the middle of one only after the longer time.
void TestLeavesAStuckWorkerAlone() {
  for (const bool inside : {false, true}) {
    TierWorker worker(1);
    if (!inside) worker.stall().Ask(kForGood);
    std::atomic<bool> began{!inside};
    std::atomic<bool> stuck{inside};
    worker.Launch([&](ThreadPool&) {
      const TierWorker::Step step(&worker);
      began = true;
      while (stuck) std::this_thread::sleep_for(milliseconds(1));
    });
    while (!began) std::this_thread::yield();
    worker.Cancel();
    const auto start = std::chrono::steady_clock::now();
    CHECK(!worker.Stop(milliseconds(50), milliseconds(300)));
    CHECK(MillisecondsSince(start) >= (inside ? 300 : 50));
    stuck = false;
    worker.stall().Ask({});
    CHECK(worker.Stop(kSoon, kSoon));
  }
}

void TestKeepsWhatAJobThrew() {
  TierWorker worker(2);
  worker.Launch([](ThreadPool& pool) {
    pool.Run(8, [](int64_t i) {
      if (i == 5) throw std::runtime_error("five");
    });
  });
  CHECK(worker.Finish(kSoon));
  const std::exception_ptr error = worker.TakeError();
  CHECK(error != nullptr);
  CHECK(worker.TakeError() == nullptr);
  worker.Launch([](ThreadPool&) {});
  CHECK(worker.Finish(kSoon));
  CHECK(worker.TakeError() == nullptr);
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestRunsJobsOneAfterTheOther);
  RUN(TestWaitsForAWorkerThatMoves);
  RUN(TestGivesUpASilentWorkerInTime);
  RUN(TestHoldsWhatTheJobHolds);
  RUN(TestBeginsNothingOnceCancelled);
  RUN(TestLeavesAStuckWorkerAlone);
  RUN(TestKeepsWhatAJobThrew);
  return 0;
}
