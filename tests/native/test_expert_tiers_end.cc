// Tests of how ffi/weights/expert_tiers.h ends: closed while it works, and workers that do not
// answer. Built and run by tests/native/run. Argument: a folder for the file of experts (default
// /tmp).

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "common/thread_pool.h"
#include "tiers_model.h"

namespace strata {
namespace {

std::string folder = "/tmp";

constexpr int64_t kSwaps = 8;
constexpr float kDecay = 0.7f;
constexpr std::chrono::hours kForGood{1};  // until the test ends it

void ClosesWhileARoundRuns() {
  const TiersModel model(folder);
  const std::vector<Expected> calls = model.MakeWindow(3, 0);
  for (int i = 0; i < 20; ++i) {
    auto tiers = model.Open(FewSlots(Tier::kHost), AllWorkers(0.5));
    model.CheckWindow(calls, tiers.get());
    tiers->StartAdapt(kSwaps, kSwaps, kDecay);
    if (i % 2 == 0) RemoveTiers(AddTiers(std::move(tiers)));
  }
}

// A call that holds the tiers ends well, or is refused; none of its memory goes away under it.
void RefusesCallsOnceItIsClosed() {
  const TiersModel model(folder);
  const std::vector<Expected> calls = model.MakeWindow(5, 0);
  for (int i = 0; i < 10; ++i) {
    const int64_t slot = AddTiers(model.Open(FewSlots(Tier::kHost), AllWorkers(0.5)));
    std::atomic<bool> begun{false};
    std::thread caller([&, held = FindTiers(slot)] {
      std::string error;
      while (error.empty()) {
        std::vector<float> y;
        error = model.Call(calls[1].inputs, held.get(), &y);
        if (error.empty()) CHECK(SameBits(y, calls[1].y));
        begun = true;
      }
      CHECK_EQ(error, "refused: the tiers are closed");
    });
    while (!begun) std::this_thread::yield();
    RemoveTiers(slot);
    CHECK(FindTiers(slot) == nullptr);
    caller.join();
  }
}

// The wait ends, the late worker touches nothing of the caller's, and every later call is refused.
void EndsAWaitForAWorkerThatStalls() {
  const TiersModel model(folder);
  for (const Tier stalled : {Tier::kPeer, Tier::kHost}) {
    TierOptions options = AllWorkers(0.0);
    options.timeout = std::chrono::milliseconds(100);
    const std::vector<Tier> all(kPairs, stalled);
    const auto tiers = model.Open(all, options);
    TierWorker* worker = stalled == Tier::kPeer ? tiers->peer() : tiers->host();
    worker->stall().Ask(kForGood);
    {
      const auto inputs = std::make_unique<Inputs>(model.Make(1, 0, 0));
      std::vector<float> y;
      CHECK_CONTAINS(model.Call(*inputs, tiers.get(), &y),
                     stalled == Tier::kPeer ? "the peer's worker gave no sign of life for 100 ms"
                                            : "the host's workers gave no sign of life for 100 ms");
      CHECK_CONTAINS(model.Call(*inputs, tiers.get(), &y), "refused: the ");
    }
    CHECK(tiers->failed());
    tiers->StartAdapt(kSwaps, kSwaps, kDecay);  // nothing moves any more
    tiers->FinishAdapt();
    CHECK_EQ(tiers->Audit().size(), size_t{0});
    worker->stall().Ask({});
    RemoveTiers(AddTiers(tiers));  // waits for the worker, which comes home
    CHECK(tiers->Stop());
  }
}

// Longer than a worker is waited for at the end: tiers and worker stay, and it wakes up to nothing.
void KeepsWhatAStuckWorkerMayLookAt() {
  const TiersModel model(folder);
  TierOptions options = AllWorkers(0.0);
  options.timeout = std::chrono::milliseconds(50);
  auto tiers = model.Open(std::vector<Tier>(kPairs, Tier::kPeer), options);
  TierWorker* worker = tiers->peer();
  worker->stall().Ask(kForGood);
  std::vector<float> y;
  CHECK_CONTAINS(model.Call(model.Make(0, 0, 0), tiers.get(), &y), "the peer's worker");
  const int64_t slot = AddTiers(std::move(tiers));
  RemoveTiers(slot);
  CHECK(FindTiers(slot) == nullptr);
  worker->stall().Ask({});
  CHECK(worker->Stop(std::chrono::seconds(20), std::chrono::seconds(20)));
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  using namespace strata;
  if (argc > 1) folder = argv[1];
  ThreadPool::SetThreads(2);
  RUN(ClosesWhileARoundRuns);
  RUN(RefusesCallsOnceItIsClosed);
  RUN(EndsAWaitForAWorkerThatStalls);
  RUN(KeepsWhatAStuckWorkerMayLookAt);
  std::printf("ok\n");
}
