// expert_tiers: which expert is where, and the memory of the devices that the host stands in for.
//
// An expert is one (layer, expert) pair: gate, up and down rows as raw GGUF blocks. Its home is the
// mapped file (tier host, or file where RAM is short); a copy in a slot of the primary's or the
// peer's arena moves it to that tier. Every expert is in exactly one tier at a time, and by
// contract T the tier never shows in a result.
//
// Shared words and their order:
//   word[layer, expert]  tier << 56 | byte offset of the slot in that tier's arena. Written by
//   Place before any
//                        op runs, later by the adapting thread only. Read by ops through a Reader.
//   readers[layer]       raised by a Reader before it looks at any word of the layer, lowered when
//   the op has
//                        used the bytes.
// A swap writes the victim's word (home tier), then waits until readers[layer] is zero, then copies
// the newcomer into the slot, then writes its word. All these accesses are sequentially consistent:
// a reader that saw the victim's old word raised its count before the victim's word changed, so the
// swap sees it and waits; one that comes later sees the victim at home. So nobody reads a slot
// while it is written, and a word names bytes that have landed.
//   counts[layer, expert]  raised by ops (relaxed: only sums matter), taken by the adapting thread
//   between
//                        windows.
// Arenas and the staging slots are allocated once and never moved.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/swap_plan.h"
#include "weights/tier_worker.h"
#include "weights/weight_store.h"

namespace strata {

enum class Tier : uint8_t { kHost = 0, kPrimary = 1, kPeer = 2, kFile = 3 };

struct Residence {
  Tier tier;
  int64_t offset;  // of the slot, for primary and peer
};

struct TierCounters {
  std::atomic<int64_t> entries_primary{0};
  std::atomic<int64_t> entries_peer{0};
  std::atomic<int64_t> entries_stream{0};
  std::atomic<int64_t> entries_host{0};
  std::atomic<int64_t> entries_file{0};
  std::atomic<int64_t> bytes_swapped{0};
  std::atomic<int64_t> bytes_streamed{0};
  std::atomic<int64_t> bytes_read{0};
  std::atomic<int64_t> swaps_primary{0};
  std::atomic<int64_t> swaps_peer{0};
  std::atomic<int64_t> waits_us{0};
};

struct TierOptions {
  int64_t primary_bytes = 0;  // of the arena; 0: no such device
  int64_t peer_bytes = 0;
  int peer_threads = 1;
  int host_threads = 0;       // 0: host experts run on the ops' own pool
  double stream_share = 0.0;  // of a window's missed experts, copied and computed by the primary
  int64_t stream_slots = 16;  // missed experts that are copied at once; more take several rounds
  std::chrono::milliseconds timeout{60000};  // of a worker, from its last sign of life
};

// One exchange of an expert for another in the same slot of a tier.
struct Swap : SwapPair {
  Tier tier;
};

class ExpertTiers {
 public:
  ExpertTiers(std::shared_ptr<WeightStore> store, const std::array<int64_t, 3>& roles,
              int64_t num_layers, const TierOptions& options);
  ~ExpertTiers();
  ExpertTiers(const ExpertTiers&) = delete;
  ExpertTiers& operator=(const ExpertTiers&) = delete;

  int64_t num_layers() const { return num_layers_; }
  int64_t num_experts() const { return num_experts_; }
  const TierOptions& options() const { return options_; }

  // Tier, slot offset and home of every expert, [layers * experts]. Copies nothing: Fill does.
  // Returns what is wrong with the arguments (a slot outside its arena, two experts in one), or an
  // empty string.
  std::string Place(const uint8_t* tiers, const int64_t* offsets, const uint8_t* homes);

  // Copies the bytes of experts [first, first + count) into their slots; returns the bytes copied.
  // The experts' words name their slots afterwards.
  int64_t Fill(int64_t first, int64_t count);

  // Page-locks the file's bytes of experts [first, first + count) that `wanted` marks; returns the
  // bytes locked. Stops at the first refusal of the system (RLIMIT_MEMLOCK), which the caller sees
  // by the sum.
  int64_t Lock(const uint8_t* wanted, int64_t first, int64_t count) const;

  // Holds the layer's words still for as long as it lives. A job that may outlive its call has one
  // of its own.
  class Reader {
   public:
    Reader(ExpertTiers& tiers, int64_t layer) : count_(tiers.readers_[layer]) {
      count_.fetch_add(1);
    }
    ~Reader() { count_.fetch_sub(1); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    std::atomic<int32_t>& count_;
  };

  Residence Find(int64_t layer, int64_t expert) const;
  ExpertBytes Home(int64_t layer, int64_t expert) const;
  ExpertBytes InSlot(int64_t layer, const Residence& residence) const;
  int64_t ExpertSize(int64_t layer) const { return layers_[layer].size; }
  // Copies an expert from its home to `to` (ExpertSize bytes) and tells where its matrices lie
  // there.
  ExpertBytes CopyTo(int64_t layer, int64_t expert, uint8_t* to) const;
  // Memory for a copy that lives as long as the call: slots [0, stream_slots) are for streamed
  // experts, the one behind them for those of the file tier.
  uint8_t* Staging(int64_t index) const { return staging_ + index * largest_; }
  // Gives the pages of a file-tier expert back after use.
  void Forget(int64_t layer, int64_t expert) const;
  // Asks the system to read the likeliest file-tier experts of a layer; returns at once.
  void ReadAhead(int64_t layer, int64_t num_experts);

  void Count(int64_t layer, int64_t expert, int64_t entries) {
    counts_[layer * num_experts_ + expert].fetch_add(static_cast<uint32_t>(entries),
                                                     std::memory_order_relaxed);
  }

  // Begins one adaptive round beside the step; FinishAdapt waits for it and passes on what it
  // threw. Call both between windows. After a failure nothing moves any more.
  void StartAdapt(int64_t max_swaps, int64_t max_peer_swaps, float decay);
  void FinishAdapt();

  // Compares the bytes of every slot with the file, and the words with the slots. One line for each
  // fault.
  std::vector<std::string> Audit();

  // Routed entries of every expert since the start, without decay, rounds or none. Call it between
  // rounds.
  std::vector<int64_t> Heat() const;
  std::vector<uint8_t> Tiers() const;

  // Routed ids of every call while recording: layer, rows, ids a row, then the ids.
  void SetRecording(bool on);
  void Record(int64_t layer, const int32_t* ids, int64_t num_rows, int64_t num_active);
  std::vector<int32_t> TakeRecords();

  TierCounters& counters() { return counters_; }
  TierWorker* peer() { return peer_.get(); }
  TierWorker* host() { return host_.get(); }

  // One call at a time: whoever uses workers or staging holds it.
  std::mutex& turn() { return turn_; }

  // After a wait that timed out: the workers are told to leave off, every later call is refused.
  void Fail(const std::string& why);
  bool failed() const { return failed_.load(); }
  // Why, as one sentence; empty as long as all is well.
  std::string failure() const;

  // Ends the workers. False if one is stuck: then the object must be kept for good, for the worker
  // may look at it once more, though at nothing else.
  bool Stop();

 private:
  struct Layer {
    const Matrix* gate;
    const Matrix* up;
    const Matrix* down;
    int64_t gate_bytes;  // of one expert
    int64_t up_bytes;
    int64_t down_bytes;
    int64_t size;  // of a slot: all three side by side, rounded up to kSlotAlign
  };

  uint8_t* Arena(Tier tier) const { return tier == Tier::kPeer ? peer_arena_ : primary_arena_; }
  int64_t ArenaBytes(Tier tier) const {
    return tier == Tier::kPeer ? options_.peer_bytes : options_.primary_bytes;
  }
  ExpertBytes At(const Layer& layer, const uint8_t* base) const;
  void AdaptRound(TierWorker* worker, int64_t max_swaps, int64_t max_peer_swaps, float decay);
  std::vector<Swap> PlanSwaps(Tier tier, int64_t max_swaps) const;
  void DoSwap(const Swap& swap);
  void Allocate();

  std::shared_ptr<WeightStore> store_;
  int64_t num_layers_;
  int64_t num_experts_ = 0;
  TierOptions options_;
  std::vector<Layer> layers_;
  std::vector<uint8_t> homes_;
  std::unique_ptr<std::atomic<uint64_t>[]> words_;
  std::unique_ptr<std::atomic<uint32_t>[]> counts_;
  std::unique_ptr<std::atomic<int32_t>[]> readers_;
  std::vector<float> usage_;   // decayed: what rounds go by
  std::vector<int64_t> heat_;  // what rounds have taken of counts_, without decay
  uint8_t* primary_arena_ = nullptr;
  uint8_t* peer_arena_ = nullptr;
  uint8_t* staging_ = nullptr;
  int64_t largest_ = 0;  // slot
  std::unique_ptr<TierWorker> peer_;
  std::unique_ptr<TierWorker> host_;
  std::unique_ptr<TierWorker> adapter_;
  std::atomic<bool> recording_{false};
  std::mutex turn_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  std::string failure_;
  std::mutex records_mutex_;
  std::vector<int32_t> records_;
  TierCounters counters_;
};

// Slots begin at multiples of this. The kernels need no alignment inside a slot.
inline constexpr int64_t kSlotAlign = 256;
inline int64_t SlotAligned(int64_t bytes) {
  return (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
}

int64_t AddTiers(std::shared_ptr<ExpertTiers> tiers);
// Also ends the workers, and keeps tiers for good that have a stuck one.
void RemoveTiers(int64_t slot);
std::shared_ptr<ExpertTiers> FindTiers(int64_t slot);

}  // namespace strata
