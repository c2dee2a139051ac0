// Experts in a second device's memory, and the way of a window's rows there and back.
//
// A layer forks: the peer's stream waits for the primary's and computes the rows of the entries
// whose experts are the peer's, while the primary computes its own; it joins before the primary
// adds a row's entries up. Fork and join are events, so a captured step holds the peer's kernels as
// nodes of its graph, and replaying it asks nobody. A thread that captures sees the primary as its
// current device before and after.
//
// Operands are copied to another device once a layer: its kernels read a row in every block, and
// memory of the primary is cached by the primary only. With them go the words of the entries'
// experts, as the primary's table has them: one table decides, for both devices at once. Rows come
// back by stores, each value once; the primary's kernels look for them while they run
// (peer_bell.h).
//
// Where devices do not reach each other's memory both ways go through mapped memory of the host:
// the primary writes the operands there before the fork, the peer writes its rows there.
//
// On the primary's own device (loopback) all of this is so but for the copy to another device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/ops/expert_ffn.h"
#include "cuda/peer_attention.h"
#include "cuda/peer_bell.h"
#include "cuda/peer_branch.h"
#include "cuda/peer_inputs.h"
#include "cuda/peer_tiles.h"

namespace strata {

struct PeerSizes {
  int64_t expert_bytes = 0;  // of its arena
  int64_t max_rows = 0;      // of a window
  int64_t num_active = 0;
  int64_t num_experts = 0;  // of a layer
  int64_t width = 0;
  int64_t hidden = 0;  // of the widest expert, routed or shared
};

class PeerStore {
 public:
  // The primary is the current device. Throws std::runtime_error with numbers.
  PeerStore(int device, bool through_host, const PeerSizes& sizes);
  ~PeerStore();
  PeerStore(const PeerStore&) = delete;
  PeerStore& operator=(const PeerStore&) = delete;

  int device() const { return branch_.device(); }
  // Whether the primary's kernels can read its experts.
  bool is_reached() const { return device() == primary_ || !through_host_; }
  // Whether its experts lie on another device than the primary's.
  bool is_elsewhere() const { return device() != primary_; }
  uint8_t* arena() const { return arena_; }
  const PeerSizes& sizes() const { return sizes_; }
  // [max_rows * num_active, width], where the primary finds them: its own memory, or mapped memory
  // of the host.
  const float* rows() const { return rows_; }

  // Lets it compute rows of prompts, too (peer_tiles.h); before anything is compiled.
  std::string OpenTiles(const PeerTileSizes& sizes);
  PeerTiles* tiles() const { return tiles_.get(); }
  // Lets it take rows of attention (peer_attention.h); before anything is compiled.
  std::string OpenAttention(const PeerAttentionSizes& sizes);
  PeerAttention* attention() const { return attention_.get(); }
  // Times what both do in programs that are compiled from now on.
  std::string OpenTimeline(int64_t capacity);
  // (nanoseconds of its clock, PeerPhase) of all marks since the last time.
  std::vector<std::pair<uint64_t, uint64_t>> TakeTimeline();

  // What the primary's kernels of a window are told of it: where they look for its rows while they
  // run, if they can, and how much of a card that is the peer's, too, they take.
  std::string ShareCard(ExpertFfnArgs* window) const;
  // Enqueues what the peer does for `window`, whose `stream` is the primary's.
  std::string Fork(const ExpertFfnArgs& window, cudaStream_t stream);
  // Makes the stream wait for the end of the last fork's work.
  std::string Join(cudaStream_t stream) { return branch_.Join(stream); }

  // Runs the kernels of such a window once, without rows: a kernel's code is loaded at its first
  // use, which is no work for a stream that is captured.
  std::string Warm(const ExpertFfnArgs& window);

  // Silence after which the primary gives up waiting for rows.
  void SetTimeout(int64_t timeout_ms);
  // Whether it has, so that no result means anything.
  bool aborted() const;
  // Fit for use again, once what is queued has ended; called between steps.
  std::string Recover();
  // For tests: rows that are asked for never come, until Recover, and waits end that soon. With no
  // step under way.
  void LoseRows(int64_t timeout_ms);

 private:
  std::string AllocateOnPrimary();
  std::string AllocateBell();
  std::string AllocateOnPeer();
  void Release();
  // Whether the primary's operands are in its own memory.
  bool IsNear() const { return device() == primary_ && !through_host_; }
  // What the peer's kernels of a window are told.
  ExpertFfnArgs ArgsOf(const ExpertFfnArgs& window, const WindowInputs& inputs) const;
  std::string Compute(const ExpertFfnArgs& window, const WindowInputs& inputs);

  int primary_;
  bool through_host_;
  PeerSizes sizes_;
  PeerBranch branch_;  // its memory is the kernels' workspace
  uint8_t* arena_ = nullptr;
  WindowRoom inputs_ = {};      // the peer's
  int32_t* entries_ = nullptr;  // 0, 1, 2 and so on: the entries' numbers in inputs_.words
  WindowRoom on_host_ = {};     // mapped; null where devices reach each other's memory
  float* rows_ = nullptr;
  PeerBellAt bell_;  // null where devices do not reach each other's memory
  std::unique_ptr<PeerTiles> tiles_;
  std::unique_ptr<PeerAttention> attention_;
  std::unique_ptr<Timeline> timeline_;  // of the two
};

}  // namespace strata
