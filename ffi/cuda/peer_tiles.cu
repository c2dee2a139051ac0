#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cuda/current_device.h"
#include "cuda/ops/expert_tile_launch.h"
#include "cuda/peer_pull.h"
#include "cuda/peer_tiles.h"

namespace strata {
namespace {

using expert_tiles::ExpertTile;
using expert_tiles::MostTiles;
using tiles::QuantizedRows;
using tiles::RoundUp;

// The parts of the peer's memory.
struct Layout {
  int64_t order, counts, tiles, first_tiles, addresses, words, live, in, hidden, bytes;

  explicit Layout(const PeerTileSizes& s) {
    const int64_t entries = s.max_rows * s.num_active;
    int64_t at = 0;
    const auto take = [&at](int64_t size) {
      const int64_t begin = at;
      at += RoundUp(size, 256);
      return begin;
    };
    order = take(4 * entries);
    counts = take(4 * s.num_experts);
    tiles = take(static_cast<int64_t>(sizeof(ExpertTile)) * MostTiles(entries, s.num_experts));
    first_tiles = take(4 * (s.num_experts + 1));
    addresses = take(8 * s.num_experts);
    words = take(8 * s.num_experts);
    live = take(4);
    in = take(QuantizedRows::Bytes(s.max_rows, s.width));
    hidden = take(QuantizedRows::Bytes(entries, s.hidden));
    bytes = at;
  }
};

}  // namespace

int64_t PeerShare::Of(int64_t count) const {
  return static_cast<int64_t>(std::floor(static_cast<double>(count) * share_));
}

bool PeerShare::Next() {
  const int64_t before = Of(seen_++);
  return Of(seen_) > before;
}

int64_t PeerTilesBytes(const PeerTileSizes& sizes) { return Layout(sizes).bytes; }

PeerTiles::PeerTiles(int device, const PeerTileSizes& sizes)
    : sizes_(sizes), branch_("peer_tiles", device, PeerTilesBytes(sizes)) {
  const CurrentDevice current(device);
  // No row is live, no expert has an entry, before the first tile.
  cudaError_t error = cudaMemset(branch_.memory(), 0, Layout(sizes).in);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) throw std::runtime_error(branch_.Failed("the first write", error));
}

PeerTiles::~PeerTiles() { cudaFree(taken_); }

std::string PeerTiles::OpenRing(const RingSizes& sizes, double share) {
  if (ring_ != nullptr) return "peer_tiles: a ring is opened once";
  const int64_t bytes = sizes_.num_layers * sizes_.num_experts;
  cudaError_t error = cudaMalloc(&taken_, bytes);
  if (error == cudaSuccess) error = cudaMemset(taken_, 0, bytes);
  if (error != cudaSuccess) return branch_.Failed("a table", error);
  const CurrentDevice current(branch_.device());
  try {
    ring_ = std::make_unique<ExpertRing>(sizes);
  } catch (const std::runtime_error& problem) {
    return problem.what();
  }
  share_ = share;
  return "";
}

std::string PeerTiles::SetTaken(std::vector<ExpertRing::Entry> list) {
  std::vector<uint8_t> taken(sizes_.num_layers * sizes_.num_experts);
  for (const ExpertRing::Entry& entry : list) {
    taken[entry.layer * sizes_.num_experts + entry.expert] = 1;
  }
  const cudaError_t error = cudaMemcpy(taken_, taken.data(), taken.size(), cudaMemcpyHostToDevice);
  if (error != cudaSuccess) return branch_.Failed("a copy", error);
  const CurrentDevice current(branch_.device());
  return ring_->SetList(std::move(list));
}

PeerTileCall PeerTiles::Own(const PeerTileCall& call) const {
  const Layout at(sizes_);
  PeerTileCall own = call;
  own.groups.starts = nullptr;  // for who makes the lists
  own.groups.order = reinterpret_cast<int32_t*>(branch_.memory() + at.order);
  own.groups.counts = reinterpret_cast<int32_t*>(branch_.memory() + at.counts);
  own.groups.tiles = reinterpret_cast<ExpertTile*>(branch_.memory() + at.tiles);
  own.groups.first_tiles = reinterpret_cast<int32_t*>(branch_.memory() + at.first_tiles);
  own.words = reinterpret_cast<uint64_t*>(branch_.memory() + at.words);
  own.live = reinterpret_cast<int32_t*>(branch_.memory() + at.live);
  own.in = QuantizedRows::At(branch_.memory() + at.in, call.num_rows, sizes_.width);
  return own;
}

std::string PeerTiles::Fork(const PeerTileCall& call, cudaStream_t stream) {
  if (call.num_rows > sizes_.max_rows || call.num_active != sizes_.num_active ||
      call.num_experts != sizes_.num_experts || call.routed->gate.cols != sizes_.width ||
      call.routed->gate.rows > sizes_.hidden) {
    return "peer_tiles: " + std::to_string(call.num_rows) + " rows of " +
           std::to_string(call.routed->gate.cols) + ", it has room for " +
           std::to_string(sizes_.max_rows) + " of " + std::to_string(sizes_.width);
  }
  std::string error = branch_.Fork(stream);
  if (!error.empty()) return error;
  const CurrentDevice current(branch_.device());
  const PeerTileCall own = Own(call);
  error = branch_.Mark(PeerPhase::kRowsIn);
  if (error.empty()) error = Pull(call, own);
  if (error.empty()) error = Compute(call, own);
  return error.empty() ? branch_.End() : error;
}

std::string PeerTiles::Pull(const PeerTileCall& call, const PeerTileCall& to) {
  const int64_t most =
      MostTiles(call.num_rows * call.num_active, call.num_experts, call.groups.tile_rows);
  const int64_t values = call.in.values;
  const auto rows = [](const void* from, void* at, int64_t bytes) {
    return PullPiece{from, at, bytes, 1, PullCount::kRows};
  };
  const auto all = [](const void* from, void* at, int64_t bytes) {
    return PullPiece{from, at, bytes, 1, PullCount::kAll};
  };
  const std::vector<PullPiece> pieces = {
      rows(call.in.codes, to.in.codes, values),
      rows(call.in.scales, to.in.scales, values / 8),
      rows(call.in.sums, to.in.sums, values / 4),
      rows(call.groups.order, to.groups.order, 4 * call.num_active),
      all(call.groups.counts, to.groups.counts, 4 * call.num_experts),
      all(call.groups.tiles, to.groups.tiles, static_cast<int64_t>(sizeof(ExpertTile)) * most),
      all(call.groups.first_tiles, to.groups.first_tiles, 4 * (call.num_experts + 1)),
      all(call.words, const_cast<uint64_t*>(to.words), 8 * call.num_experts)};
  PullNumbers numbers = {};
  numbers.live = call.live;
  numbers.num_rows = call.num_rows;
  numbers.peers_live = const_cast<int32_t*>(to.live);
  return strata::Pull(pieces, numbers, branch_.stream());
}

std::string PeerTiles::Compute(const PeerTileCall& call, const PeerTileCall& own) {
  const Layout at(sizes_);
  const int64_t entries = call.num_rows * call.num_active;
  expert_tiles::GateArgs gate;
  if (ring_ != nullptr) gate.ring = ring_->At(call.layer);
  gate.part = expert_tiles::GatePart::kPeers;
  gate.words = own.words;
  gate.counts = own.groups.counts;
  gate.live = own.live;
  gate.addresses = reinterpret_cast<uint64_t*>(branch_.memory() + at.addresses);
  gate.num_rows = static_cast<int32_t>(call.num_rows);
  gate.num_experts = static_cast<int32_t>(call.num_experts);
  expert_tiles::TileParams up = {};
  up.groups = own.groups;
  up.live = own.live;
  up.num_rows = gate.num_rows;
  up.num_active = static_cast<int32_t>(call.num_active);
  up.in = own.in;
  up.out = QuantizedRows::At(branch_.memory() + at.hidden, entries, call.routed->gate.rows);
  up.sums = call.sums;
  up.slice = static_cast<int32_t>(call.slice);
  expert_tiles::TileParams down = up;
  down.in = up.out;
  const int64_t groups = gate.ring.groups;
  const int64_t tiles =
      MostTiles(entries, std::min(call.num_experts, (call.num_experts + groups - 1) / groups),
                call.groups.tile_rows);
  std::string error = ring_ == nullptr ? "" : TellRouting(gate, branch_.stream());
  for (int64_t group = 0; group < groups && error.empty(); ++group) {
    const auto range = expert_tiles::RangeOf(call.num_experts, groups, group);
    const auto params = [&](const expert_tiles::TileParams& p, bool is_down) {
      return RoutedParams(p, *call.routed, gate.addresses, range, groups == 1, is_down);
    };
    error = branch_.Mark(PeerPhase::kWait);
    if (error.empty()) error = AwaitGroup(gate, group, branch_.stream());
    if (error.empty()) error = branch_.Mark(PeerPhase::kGateUp);
    if (error.empty()) error = LaunchGateUp(params(up, false), tiles, branch_.stream());
    if (error.empty()) error = branch_.Mark(PeerPhase::kDown);
    if (error.empty()) error = LaunchDown(params(down, true), tiles, branch_.stream());
  }
  if (error.empty() && ring_ != nullptr) error = LeaveRing(gate, branch_.stream());
  return error;
}

std::string PeerTiles::Warm(const ExpertShape& routed) {
  PeerTileCall call = {};
  call.routed = &routed;
  call.groups.tile_rows = expert_tiles::kTileRows;
  call.num_rows = sizes_.max_rows;
  call.num_active = sizes_.num_active;
  call.num_experts = sizes_.num_experts;
  call.slice = RoundUp(sizes_.width, 128);
  const PeerTileCall own = Own(call);
  const CurrentDevice current(branch_.device());
  std::string error = Pull(own, own);  // of no row
  if (error.empty()) error = Compute(own, own);
  if (!error.empty()) return error;
  const cudaError_t done = cudaStreamSynchronize(branch_.stream());
  return done == cudaSuccess ? "" : branch_.Failed("its kernels", done);
}

}  // namespace strata
