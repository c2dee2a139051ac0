// The peer's part of a prompt's tile: rows whose experts are in its memory, and of experts in the
// host's memory that it streams over its own link.
//
// A layer forks behind the primary's grouping of entries. The peer copies the tile's quantised rows
// and the lists to its own memory, each byte once; then, group by group as the primary does, it
// waits for what its ring brings (expert_ring.h) and computes by the same kernels. The second of
// them stores an entry's row where the primary's own would be, in the primary's memory, each value
// once: no row lies on the peer. The primary adds rows behind the join, in the router's order, so
// nobody sees who computed one.
//
// Order. Fork and join are events, so a captured step holds the peer's kernels as nodes, and the
// copies of one layer are read by no later kernel than that layer's join. The peer's gates wait for
// copies and the CPU only, as the primary's do. Which experts of the host it takes changes between
// passes only, and with the list of its ring.
//
// Words are the primary's: one table decides for both. An expert of the host is taken with many
// rows only, as the ring streams with many rows only; otherwise it is the primary's as ever.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/expert_ring.h"
#include "cuda/launch.h"
#include "cuda/ops/expert_groups.h"
#include "cuda/peer_branch.h"
#include "cuda/tile_rows.h"

namespace strata {

struct ExpertShape;

struct PeerTileSizes {
  int64_t max_rows = 0;  // of a tile or chunk
  int64_t num_active = 0;
  int64_t num_experts = 0;  // of a layer
  int64_t num_layers = 0;
  int64_t width = 0;
  int64_t hidden = 0;  // of a routed expert
};

// Of the peer's memory, without its ring.
int64_t PeerTilesBytes(const PeerTileSizes& sizes);

// A layer of a tile; all pointers are the primary's.
struct PeerTileCall {
  const ExpertShape* routed;
  expert_tiles::Groups groups;
  tiles::QuantizedRows in;
  const uint64_t* words;  // [E]: expert_word.h
  const int32_t* live;
  float* sums;  // [entries, slice], all columns
  int64_t slice;
  int64_t num_rows;
  int64_t num_active;
  int64_t num_experts;
  int64_t layer;
};

// So that of n experts the peer takes a share, spread evenly.
class PeerShare {
 public:
  explicit PeerShare(double share) : share_(share) {}
  // Of n experts.
  int64_t Of(int64_t count) const;
  // Whether the next one is the peer's.
  bool Next();

 private:
  double share_;
  int64_t seen_ = 0;
};

class PeerTiles {
 public:
  // On `device`, which reaches the current one's memory, and is reached. Throws std::runtime_error.
  PeerTiles(int device, const PeerTileSizes& sizes);
  ~PeerTiles();
  PeerTiles(const PeerTiles&) = delete;
  PeerTiles& operator=(const PeerTiles&) = delete;

  // Lets it stream `share` of the host's experts. Before anything is compiled.
  std::string OpenRing(const RingSizes& sizes, double share);
  ExpertRing* ring() const { return ring_.get(); }
  double share() const { return share_; }
  // What it streams in every pass from now on, in order; as ExpertRing::SetList.
  std::string SetTaken(std::vector<ExpertRing::Entry> list);
  // [E], the primary's memory: not 0 for those; null without a ring.
  const uint8_t* taken(int64_t layer) const {
    return taken_ == nullptr ? nullptr : taken_ + layer * sizes_.num_experts;
  }
  int32_t taken_min_rows() const {
    return ring_ == nullptr ? 0 : static_cast<int32_t>(ring_->sizes().min_rows);
  }

  // Enqueues what the peer does, behind `stream` of the primary.
  std::string Fork(const PeerTileCall& call, cudaStream_t stream);
  // Makes the stream wait for the rows of the last fork.
  std::string Join(cudaStream_t stream) { return branch_.Join(stream); }
  // Loads the kernels for such experts: that is no work for a stream that is captured.
  std::string Warm(const ExpertShape& routed);

  // Times what is compiled from now on.
  void SetTimeline(const TimelineAt& timeline) { branch_.SetTimeline(timeline); }

 private:
  std::string Pull(const PeerTileCall& call, const PeerTileCall& to);
  std::string Compute(const PeerTileCall& call, const PeerTileCall& own);
  // Where a call's operands lie on the peer.
  PeerTileCall Own(const PeerTileCall& call) const;

  PeerTileSizes sizes_;
  PeerBranch branch_;
  double share_ = 0.0;
  uint8_t* taken_ = nullptr;          // [layers, experts], the primary's
  std::unique_ptr<ExpertRing> ring_;  // the peer's; it ends before the branch does
};

}  // namespace strata
