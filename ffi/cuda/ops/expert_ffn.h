// Routed experts and the shared one: y = sum of weight * down(silu(gate x) * up x), contract T.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_store.h"
#include "cuda/expert_ring.h"
#include "cuda/file_stage.h"
#include "cuda/launch.h"
#include "cuda/mailbox.h"
#include "cuda/peer_bell.h"

namespace strata {

class PeerTiles;

struct ExpertFfnArgs {
  const float* x;               // [T, D]
  const int32_t* ids;           // [T, A]
  const float* weights;         // [T, A]
  const float* shared_weights;  // [T]
  const int32_t* live;
  float* y;                  // [T, D]
  unsigned char* workspace;  // [ExpertFfnWorkspace bytes], 16-byte aligned
  int64_t num_rows;
  int64_t num_active;
  int64_t num_experts;
  int64_t width;
  const ExpertShape* routed;
  const uint64_t* experts;  // device, [E]: words (expert_word.h)
  uint32_t* usage;          // device, [E]; null: not counted
  const DeviceMatrix* shared_gate;
  const DeviceMatrix* shared_up;
  const DeviceMatrix* shared_down;
  // Whether words may have another tag than kLocal; the rest is read only then.
  bool doors;
  const float* peer_rows;   // [T * A, D], device: rows of the peer's entries, when Down runs or,
  PeerBellAt bell;          // with tellers, when those say so; for the peer's kernels, too
  int64_t most_blocks[2];   // of the first and of the second kernel, if DownBlocks; 0: of the card
  const uint8_t* streamed;  // [A + 1]: of so many kHost entries of a row, those computed here
  uint32_t* homes;          // device, [kEntryHomes]: counts; not read where `usage` is null
  MailboxAt mailbox;        // its box is null where every kHost entry is streamed
  Latch latch;              // of another layer's words, for the second kernel
  RingAt ring;              // for tiles: where experts of the host's memory arrive
  StageAt stage;            // for tiles: where those of the file are, where the ring has failed
  PeerTiles* peer_tiles;    // for tiles: what a peer computes meanwhile, if it does
  int64_t layer;            // for tiles
  TimelineAt timeline;      // for tiles
  float* rows;  // not null: the kernels are the peer's. `y` and the shared expert are left out, the
                // row of each kPeer entry goes to its place in [T * A, D], without its weight
};

int64_t ExpertFfnWorkspace(int64_t num_rows, int64_t num_active, int64_t num_experts, int64_t width,
                           int64_t hidden, bool is_whole = false);

// Blocks of the second kernel on the current device, if it is one that keeps to args.most_blocks, a
// block a multiprocessor, and knows of a bell; else 0.
int64_t DownBlocks(const ExpertFfnArgs& args);

// The two halves: what others compute may be awaited in between.
std::string ExpertGateUp(const ExpertFfnArgs& args, cudaStream_t stream);
std::string ExpertDown(const ExpertFfnArgs& args, cudaStream_t stream);

}  // namespace strata
