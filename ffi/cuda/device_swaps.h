// Experts that change places while windows run.
//
// A swap brings a newcomer from page-locked memory into a device's, the primary's or the peer's,
// and a victim the other way; nothing moves from device to device. Nothing waits for it: both are
// copied into spare room by streams of their own while steps run, and only then are their words
// changed. Words are never written where kernels read them: `wanted`, a second table, says how they
// should be, and the second kernel of a layer's expert_ffn takes over the words of the *next*
// layer, which no kernel reads at that time. So both kernels of a layer, and all their blocks, see
// the same words. The last layer takes over the first one's.
//
// When may what was copied from be written again? A window that was put into the queue before
// `wanted` had changed may use the old words, and leaves the first layer's old word to the window
// after it. One window at most is in the queue when the one before it is looked at
// (Runner.best_ids). So kRetire windows after that no kernel knows the old places; then they are
// the spares of the next round. Tiles take over nothing and change nothing about this: they use the
// words that are there, and windows behind them retire them.
//
// All of it happens between windows on the caller's thread, which waits for nothing: each call
// looks whether the copies of the call before are done and goes one step further.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/swap_plan.h"
#include "cuda/expert_word.h"
#include "cuda/launch.h"

namespace strata {

struct SwapSettings {
  int64_t every = 1;    // windows between two rounds
  int64_t most = 0;     // swaps of a round on the primary
  int64_t on_peer = 0;  // and on the peer
  float decay = 1.0f;
};

class DeviceSwaps {
 public:
  // `words` and `wanted`: on the device; `table`: what they hold, the host's copy, which stays the
  // caller's; `usage`: on the device, raised by kernels; `slot_bytes`: of each layer's experts;
  // `away_tag`: of a victim from then on. Throws std::runtime_error.
  DeviceSwaps(const SwapSettings& settings, std::vector<uint64_t>* table, uint64_t* wanted,
              const uint32_t* usage, std::vector<int64_t> slot_bytes, ExpertTag away_tag);
  ~DeviceSwaps();
  DeviceSwaps(const DeviceSwaps&) = delete;
  DeviceSwaps& operator=(const DeviceSwaps&) = delete;

  // Room for one expert of that size on the device where experts have this tag, and in page-locked
  // memory of the host.
  void AddSpares(ExpertTag tag, int64_t bytes, uint8_t* on_device, uint8_t* on_host);

  // Experts that stay where they are, by word.
  void SetFixed(std::vector<bool> fixed) { fixed_ = std::move(fixed); }

  // A window has ended. Returns what went wrong, or an empty string.
  std::string AfterWindow();
  // Ends a round that is under way: then the host's table holds where everything is, and both
  // tables of the device are to be made equal to it. No kernel may run.
  std::string Settle();

  int64_t swaps(ExpertTag tag) const { return SideOf(tag).swaps; }
  int64_t bytes_swapped() const { return bytes_; }

 private:
  enum class State { kIdle, kCounting, kCopying, kPublishing, kRetiring };
  using Spares = std::map<int64_t, std::vector<uint8_t*>>;  // by size
  // A device whose experts are exchanged.
  struct Side {
    ExpertTag tag;  // of the experts in its slots
    int64_t most;   // swaps of a round
    Spares spares;
    int64_t swaps = 0;
  };
  struct Move {
    Side* side;
    int64_t bytes;
    uint8_t* old_slot;    // the victim's, spare when all is over
    uint8_t* old_panels;  // the newcomer's
  };

  std::string StartCount();
  std::string StartCopies();
  cudaError_t CopyFor(Side* side, std::vector<bool>* moved);
  const Side& SideOf(ExpertTag tag) const { return sides_[tag == ExpertTag::kPeer]; }
  std::string Publish();
  void CountMoves();
  void Retire();
  void TakeCounts();
  bool Done(std::string* error) const;

  SwapSettings settings_;
  std::vector<uint64_t>* table_;
  uint64_t* wanted_;
  const uint32_t* usage_;
  std::vector<int64_t> slot_bytes_;
  int64_t num_layers_;
  int64_t num_experts_;
  ExpertTag away_tag_;

  cudaStream_t in_ = nullptr;   // to the device, and everything small
  cudaStream_t out_ = nullptr;  // to the host
  cudaEvent_t in_done_ = nullptr;
  cudaEvent_t out_done_ = nullptr;
  uint32_t* counts_ = nullptr;      // page-locked, what `usage` was
  uint64_t* table_copy_ = nullptr;  // page-locked, on its way to `wanted`
  std::vector<uint32_t> last_counts_;
  std::vector<float> heat_;  // decayed
  std::vector<bool> fixed_;
  Side sides_[2];
  Spares host_spares_;
  std::vector<Move> moves_;
  State state_ = State::kIdle;
  int64_t windows_ = 0;
  int64_t retire_at_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace strata
