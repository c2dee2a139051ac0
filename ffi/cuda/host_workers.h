// The host's threads that compute experts for a device's windows: one that looks into the mailbox
// (mailbox.h), and a pool.
//
// The poller (poller.h) has nothing else to do while the pool works on its letter, for the device
// sends no second one before the first is answered, so it works with the pool.
//
// A letter is cut into runs of panels: of gate and up for all its experts, then of down. The first
// panel of a run is asked of memory as a whole, for the rows of a panel are read side by side and
// the processor foresees only some of them; the next ones are asked for on the way (MultiplyPanel).
// A thread that comes to an expert's down first waits until the others are through with its hidden
// values; panels are handed out in order, so those are under way. So all threads start at once and
// nobody waits for all.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/expert_panels.h"
#include "common/thread_pool.h"
#include "cuda/mailbox.h"
#include "cuda/poller.h"

namespace strata {

// The shapes of a layer's experts; `bytes` unused.
struct HostLayer {
  Matrix gate, up, down;
};

class HostWorkers {
 public:
  // The box, zero throughout, and the room for rows outlive the workers. `experts` are by layer,
  // then expert; null bytes where the host computes none. `in_file`: which of them are likely to be
  // in no memory.
  HostWorkers(Mailbox* box, float* rows, const MailboxSizes& sizes, std::vector<HostLayer> layers,
              std::vector<ExpertBytes> experts, std::vector<bool> in_file, int num_threads);
  HostWorkers(const HostWorkers&) = delete;
  HostWorkers& operator=(const HostWorkers&) = delete;

  // See poller.h.
  void Wake() { poller_->Wake(); }
  bool Recover(std::chrono::milliseconds grace) { return poller_->Recover(grace); }
  bool Stop(std::chrono::milliseconds grace) { return poller_->Stop(grace); }
  Stall& stall() { return poller_->stall(); }

  // Seconds for a row through one of `count` experts of the layer, other ones in every round; the
  // median. Only while no step runs.
  double SecondsPerExpert(int64_t layer, int64_t count);

  int64_t entries() const { return entries_.load(std::memory_order_relaxed); }
  // Microseconds that letters have taken from doorbell to answer, as the host sees it.
  int64_t busy_us() const { return busy_us_.load(std::memory_order_relaxed); }

 private:
  struct Group : FfnGroup {
    std::atomic<int64_t> left{0};  // runs of gate and up
    std::atomic<bool> ready{false};
  };

  void Answer(uint64_t epoch);
  void Gather(int64_t layer, int64_t num_live, const uint32_t* masks, const int32_t* ids);
  void Compute(int64_t layer, const float* x, int64_t num_rows, float* out);
  void RunJob(int64_t job, float* out);
  void RunGateUp(Group& group, int64_t run);
  void RunDown(const Group& group, int64_t run, float* out);

  Mailbox* box_;
  float* rows_;
  MailboxSizes sizes_;
  std::vector<HostLayer> layers_;
  std::vector<FfnMatrices> matrices_;
  std::vector<ExpertBytes> experts_;
  std::vector<bool> in_file_;
  int64_t num_experts_;

  // Of the letter under way; sized for the largest once.
  struct Entry {
    int32_t expert;
    int32_t place;
  };
  std::vector<Entry> sorted_;  // by expert
  std::unique_ptr<Group[]> groups_;
  int64_t num_groups_ = 0;
  int64_t gate_runs_ = 0;  // of one expert
  int64_t down_runs_ = 0;
  FfnRows work_;
  std::vector<int32_t> identity_;

  std::mutex turn_;  // who computes: the poller, or a measurement
  std::atomic<int64_t> entries_{0};
  std::atomic<int64_t> busy_us_{0};
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Poller> poller_;  // last: it ends before what it uses goes away
};

}  // namespace strata
