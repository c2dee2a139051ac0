// Where a tile's experts lie, by group: those of the host's memory and of the file are awaited in a
// ring of slots (expert_ring.h), or read over the link where there is none.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/expert_ring.h"
#include "cuda/file_stage.h"
#include "cuda/launch.h"
#include "cuda/ops/expert_groups.h"

namespace strata::expert_tiles {

// Which experts the kernels behind a gate compute: all, or what one of two devices does.
enum class GatePart : int32_t { kAll, kPrimarys, kPeers };

struct GateArgs {
  RingAt ring;
  GatePart part = GatePart::kAll;
  const uint8_t* taken = nullptr;  // [E]: of kPrimarys, experts of the host's memory that the peer
  int32_t taken_min_rows = 0;      // takes when so many rows are live
  const uint64_t* words;           // [E]: expert_word.h
  const int32_t* counts;           // [E]: entries of each expert
  const int32_t* live;             // rows
  uint64_t* addresses;             // [E]: of panels, 0 where there are none; filled group by group
  uint32_t* homes = nullptr;       // device, [kEntryHomes]: counts
  StageAt stage;  // of a layer with experts in the file: asked where the ring fails
  int32_t num_rows = 0;
  int32_t num_experts = 0;
  int32_t tile_rows = kTileRows;  // entries of an expert that are computed at one read of it
};

// Experts [first, end) of a group.
struct GroupRange {
  int32_t first;
  int32_t end;
};
GroupRange RangeOf(int64_t num_experts, int64_t groups, int64_t group);

// As soon as `counts` are there: tells the ring what it need not copy.
std::string TellRouting(const GateArgs& args, cudaStream_t stream);
// Returns, in stream order, when a group's experts are there.
std::string AwaitGroup(const GateArgs& args, int64_t group, cudaStream_t stream);
// Behind the last group's products: gives its slots back, and ends the pass behind the last layer.
std::string LeaveRing(const GateArgs& args, cudaStream_t stream);

}  // namespace strata::expert_tiles
