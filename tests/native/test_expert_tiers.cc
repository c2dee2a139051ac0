// Tests of ffi/weights/expert_tiers.h and ffi/ops/expert_ffn.h on threads: every result has the
// bits of the call without tiers, whatever moves beside it. Built and run by tests/native/run;
// `thread` looks for races. Argument: a folder for the file of experts (default /tmp).

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "check.h"
#include "common/thread_pool.h"
#include "tiers_model.h"

namespace strata {
namespace {

std::string folder = "/tmp";

constexpr int64_t kSwaps = 8;
constexpr float kDecay = 0.7f;
constexpr int kRepeats = 4;  // of a window, so that calls and rounds meet often

int64_t Entries(const TierCounters& c) {
  return c.entries_primary + c.entries_peer + c.entries_stream + c.entries_host + c.entries_file;
}

// Experts that a device holds now and did not before, by layer.
std::vector<int64_t> Entered(Tier tier, const std::vector<uint8_t>& before,
                             const std::vector<uint8_t>& after) {
  std::vector<int64_t> entered(kNumLayers, 0), left(kNumLayers, 0);
  for (int64_t i = 0; i < kPairs; ++i) {
    const bool was = before[i] == static_cast<uint8_t>(tier);
    const bool is = after[i] == static_cast<uint8_t>(tier);
    entered[i / kExperts] += is && !was;
    left[i / kExperts] += was && !is;
  }
  for (int64_t l = 0; l < kNumLayers; ++l) CHECK_EQ(entered[l], left[l]);
  return entered;
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

// Everything must be as one round of swaps says: words, slots, counters.
class Rounds {
 public:
  explicit Rounds(ExpertTiers& tiers) : tiers_(tiers), before_(tiers.Tiers()) {}

  void CheckAfterRound() {
    CHECK_EQ(tiers_.Audit().size(), size_t{0});
    const std::vector<uint8_t> after = tiers_.Tiers();
    const auto primary = Entered(Tier::kPrimary, before_, after);
    const auto peer = Entered(Tier::kPeer, before_, after);
    swaps_primary += Sum(primary);
    swaps_peer += Sum(peer);
    for (int64_t l = 0; l < kNumLayers; ++l) {
      bytes_ += (primary[l] + peer[l]) * tiers_.ExpertSize(l);
    }
    CHECK(Sum(primary) <= kSwaps && Sum(peer) <= kSwaps);
    CHECK_EQ(tiers_.counters().swaps_primary.load(), swaps_primary);
    CHECK_EQ(tiers_.counters().swaps_peer.load(), swaps_peer);
    CHECK_EQ(tiers_.counters().bytes_swapped.load(), bytes_);
    before_ = after;
  }

  int64_t swaps_primary = 0;
  int64_t swaps_peer = 0;

 private:
  ExpertTiers& tiers_;
  std::vector<uint8_t> before_;
  int64_t bytes_ = 0;
};

// Records must be whole calls, whenever recording began and whoever else records.
int64_t CheckRecords(const std::vector<int32_t>& records) {
  int64_t entries = 0;
  for (size_t at = 0; at < records.size();) {
    CHECK(records.size() - at >= 3);
    CHECK(records[at] >= 0 && records[at] < kNumLayers);
    CHECK_EQ(records[at + 2], kActive);
    const int64_t ids = int64_t{records[at + 1]} * kActive;
    CHECK(static_cast<int64_t>(records.size() - at) >= 3 + ids);
    for (int64_t i = 0; i < ids; ++i) {
      CHECK(records[at + 3 + i] >= 0 && records[at + 3 + i] < kExperts);
    }
    at += 3 + ids;
    entries += ids;
  }
  return entries;
}

// Runs `body` on a thread again and again for as long as it lives.
class Beside {
 public:
  explicit Beside(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          while (!stop_) {
            body();
            std::this_thread::sleep_for(std::chrono::microseconds(50));
          }
        }) {}
  ~Beside() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void GivesTheSameBitsWhereverTheExpertsAre() {
  const TiersModel model(folder);
  std::vector<Tier> mixed = FewSlots(Tier::kHost);
  for (int64_t i = 0; i < kPairs; i += 4) mixed[i] = Tier::kFile;
  for (const auto& tiers :
       {std::vector<Tier>(kPairs, Tier::kHost), std::vector<Tier>(kPairs, Tier::kPrimary),
        std::vector<Tier>(kPairs, Tier::kPeer), std::vector<Tier>(kPairs, Tier::kFile), mixed}) {
    for (const double share : {0.0, 0.5, 1.0}) {
      for (const int host_threads : {0, 1, 3}) {
        TierOptions options = AllWorkers(share);
        options.host_threads = host_threads;
        const Tier home = tiers[0] == Tier::kFile ? Tier::kFile : Tier::kHost;
        const auto opened = model.Open(tiers, options, home);
        int64_t entries = 0;
        for (int window = 0; window < 6; ++window) {
          entries += model.CheckWindow(model.MakeWindow(window, 0), opened.get());
        }
        const TierCounters& counters = opened->counters();
        CHECK_EQ(Entries(counters), entries);
        CHECK_EQ(counters.entries_stream > 0,
                 share > 0 && counters.entries_host + counters.entries_stream > 0);
        CHECK_EQ(counters.bytes_swapped.load(), 0);
        CHECK_EQ(opened->Audit().size(), size_t{0});
      }
    }
  }
}

// Windows of one or several callers. `beside`: the round runs while they call, as fast as it can;
// else it ends before they begin, as the engine has it.
void AdaptsHectically(int num_callers, int num_windows, bool beside, Tier home, double share) {
  const TiersModel model(folder);
  const auto tiers = model.Open(FewSlots(home), AllWorkers(share), home);
  Rounds rounds(*tiers);
  std::atomic<int64_t> entries{0}, recorded{0};
  {
    int turn = 0;
    const Beside recorder([&] {
      tiers->SetRecording(++turn % 3 != 0);
      recorded += CheckRecords(tiers->TakeRecords());
    });
    const Beside reader([&] {
      CHECK(tiers->counters().swaps_primary >= 0 && !tiers->failed());
      CHECK_EQ(tiers->Tiers().size(), size_t{kPairs});
    });
    for (int window = 0; window < num_windows; ++window) {
      std::vector<std::vector<Expected>> calls;
      for (int c = 0; c < num_callers; ++c) calls.push_back(model.MakeWindow(window, c));
      tiers->StartAdapt(kSwaps, kSwaps, kDecay);
      if (!beside) tiers->FinishAdapt();
      std::vector<std::thread> callers;
      for (int c = 0; c < num_callers; ++c) {
        callers.emplace_back([&, c] {
          for (int i = 0; i < kRepeats; ++i) {
            entries += model.CheckWindow(calls[c], tiers.get());
          }
        });
      }
      for (std::thread& caller : callers) caller.join();
      tiers->FinishAdapt();
      rounds.CheckAfterRound();
    }
  }
  const TierCounters& counters = tiers->counters();
  CHECK_EQ(Entries(counters), entries.load());
  CHECK(recorded > 0 && recorded <= entries);
  CHECK(rounds.swaps_primary > num_windows / 2 && rounds.swaps_peer > num_windows / 2);
  CHECK(counters.entries_primary > 0 && counters.entries_peer > 0);
  CHECK((home == Tier::kFile ? counters.entries_file : counters.entries_host) > 0);
  std::printf("  %d caller(s)%s: %lld swaps\n", num_callers, beside ? ", rounds beside them" : "",
              static_cast<long long>(rounds.swaps_primary + rounds.swaps_peer));
}

void GivesTheSameBitsWhileItAdaptsBetweenWindows() {
  AdaptsHectically(1, 40, false, Tier::kHost, 0.5);
  AdaptsHectically(1, 20, false, Tier::kFile, 0.0);
}

void GivesTheSameBitsWhileItAdaptsBesideTheCaller() {
  AdaptsHectically(1, 40, true, Tier::kHost, 0.5);
  AdaptsHectically(1, 20, true, Tier::kFile, 0.0);
}

void GivesTheSameBitsToTwoCallersAtOnce() {
  AdaptsHectically(2, 30, false, Tier::kHost, 0.5);
  AdaptsHectically(2, 30, true, Tier::kHost, 0.5);
  AdaptsHectically(2, 15, true, Tier::kFile, 0.0);
}

void SwapsAlikeForTheSameUse() {
  const TiersModel model(folder);
  const auto first = model.Open(FewSlots(Tier::kHost), AllWorkers(0.5));
  const auto second = model.Open(FewSlots(Tier::kHost), AllWorkers(0.0));
  for (int window = 0; window < 20; ++window) {
    for (const auto& tiers : {first, second}) {
      tiers->StartAdapt(kSwaps, kSwaps, kDecay);
      tiers->FinishAdapt();
      model.CheckWindow(model.MakeWindow(window, 0), tiers.get());
    }
    CHECK(first->Tiers() == second->Tiers());
    CHECK(first->Heat() == second->Heat());
  }
  CHECK(first->counters().swaps_peer > 0);
}

// The round must wait for whoever may still read the victim's slot, and go on afterwards.
void LeavesASlotAloneWhileItMayBeRead() {
  const TiersModel model(folder);
  const auto tiers = model.Open(FewSlots(Tier::kHost), AllWorkers(0.0));
  const int64_t layer = 1, newcomer = 9;
  tiers->Count(layer, newcomer, 100);
  std::vector<uint8_t> before(tiers->ExpertSize(layer));
  {
    const ExpertTiers::Reader reader(*tiers, layer);
    const Residence held = tiers->Find(layer, 0);  // the first of the unused goes
    const uint8_t* slot = tiers->InSlot(layer, held).gate;
    std::memcpy(before.data(), slot, before.size());
    tiers->StartAdapt(1, 0, kDecay);
    while (tiers->Find(layer, 0).tier == Tier::kPrimary) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) {
      CHECK_EQ(std::memcmp(slot, before.data(), before.size()), 0);
      CHECK(tiers->Find(layer, newcomer).tier == Tier::kHost);
      std::this_thread::yield();
    }
  }
  tiers->FinishAdapt();
  CHECK(tiers->Find(layer, newcomer).tier == Tier::kPrimary);
  CHECK_EQ(tiers->counters().swaps_primary.load(), 1);
  CHECK_EQ(tiers->Audit().size(), size_t{0});
}

void FindsASlotThatDiffersFromTheFile() {
  const TiersModel model(folder);
  const auto tiers = model.Open(FewSlots(Tier::kHost), AllWorkers(0.0));
  const ExpertBytes slot = tiers->InSlot(2, tiers->Find(2, 4));
  const_cast<uint8_t*>(slot.down)[17] ^= 1;
  const std::vector<std::string> faults = tiers->Audit();
  CHECK_EQ(faults.size(), size_t{1});
  CHECK_CONTAINS(faults[0], "expert 4 of layer 2");
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  using namespace strata;
  if (argc > 1) folder = argv[1];
  ThreadPool::SetThreads(2);
  RUN(GivesTheSameBitsWhereverTheExpertsAre);
  RUN(GivesTheSameBitsWhileItAdaptsBetweenWindows);
  RUN(GivesTheSameBitsWhileItAdaptsBesideTheCaller);
  RUN(GivesTheSameBitsToTwoCallersAtOnce);
  RUN(SwapsAlikeForTheSameUse);
  RUN(LeavesASlotAloneWhileItMayBeRead);
  RUN(FindsASlotThatDiffersFromTheFile);
  std::printf("ok\n");
}
