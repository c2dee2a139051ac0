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

std::string Failed(const char* what, cudaError_t error) {
  return std::string("peer_tiles: ") + what + ": " + cudaGetErrorString(error);
}

}  // namespace

int64_t PeerShare::Of(int64_t count) const {
  return static_cast<int64_t>(std::floor(static_cast<double>(count) * share_));
}

bool PeerShare::Next() {
  const int64_t before = Of(seen_++);
  return Of(seen_) > before;
}

int64_t PeerTilesBytes(const PeerTileSizes& sizes) { return Layout(sizes).bytes; }

PeerTiles::PeerTiles(int device, const PeerTileSizes& sizes) : device_(device), sizes_(sizes) {
  const std::string error = Allocate();
  if (error.empty()) return;
  Release();
  throw std::runtime_error(error);
}

PeerTiles::~PeerTiles() { Release(); }

std::string PeerTiles::Allocate() {
  cudaError_t error = cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming);
  if (error != cudaSuccess) return Failed("an event", error);
  const CurrentDevice current(device_);
  if (!current.problem().empty()) return "peer_tiles: " + current.problem();
  error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&join_, cudaEventDisableTiming);
  if (error != cudaSuccess) return Failed("a stream", error);
  const Layout at(sizes_);
  error = cudaMalloc(&memory_, at.bytes);
  // No row is live, no expert has an entry, before the first tile.
  if (error == cudaSuccess) error = cudaMemset(memory_, 0, at.in);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  const std::string what = "memory of " + std::to_string(at.bytes >> 20) + " MiB";
  return error == cudaSuccess ? "" : Failed(what.c_str(), error);
}

void PeerTiles::Release() {
  ring_ = nullptr;
  {
    const CurrentDevice current(device_);
    if (current.problem().empty()) {
      cudaDeviceSynchronize();  // a step may still be in flight
      if (join_ != nullptr) cudaEventDestroy(join_);
      if (stream_ != nullptr) cudaStreamDestroy(stream_);
      cudaFree(memory_);
    }
  }
  cudaFree(taken_);
  if (fork_ != nullptr) cudaEventDestroy(fork_);
}

std::string PeerTiles::OpenRing(const RingSizes& sizes, double share) {
  if (ring_ != nullptr) return "peer_tiles: a ring is opened once";
  const int64_t bytes = sizes_.num_layers * sizes_.num_experts;
  cudaError_t error = cudaMalloc(&taken_, bytes);
  if (error == cudaSuccess) error = cudaMemset(taken_, 0, bytes);
  if (error != cudaSuccess) return Failed("a table", error);
  const CurrentDevice current(device_);
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
  if (error != cudaSuccess) return Failed("a copy", error);
  const CurrentDevice current(device_);
  return ring_->SetList(std::move(list));
}

PeerTileCall PeerTiles::Own(const PeerTileCall& call) const {
  const Layout at(sizes_);
  PeerTileCall own = call;
  own.groups.order = reinterpret_cast<int32_t*>(memory_ + at.order);
  own.groups.counts = reinterpret_cast<int32_t*>(memory_ + at.counts);
  own.groups.tiles = reinterpret_cast<ExpertTile*>(memory_ + at.tiles);
  own.groups.first_tiles = reinterpret_cast<int32_t*>(memory_ + at.first_tiles);
  own.words = reinterpret_cast<uint64_t*>(memory_ + at.words);
  own.live = reinterpret_cast<int32_t*>(memory_ + at.live);
  own.in = QuantizedRows::At(memory_ + at.in, call.num_rows, sizes_.width);
  return own;
}

std::string PeerTiles::Mark(PeerPhase phase) const {
  return strata::Mark(timeline_, static_cast<int64_t>(phase), stream_);
}

std::string PeerTiles::Fork(const PeerTileCall& call, cudaStream_t stream) {
  if (call.num_rows > sizes_.max_rows || call.num_active != sizes_.num_active ||
      call.num_experts != sizes_.num_experts || call.routed->gate.cols != sizes_.width ||
      call.routed->gate.rows > sizes_.hidden) {
    return "peer_tiles: " + std::to_string(call.num_rows) + " rows of " +
           std::to_string(call.routed->gate.cols) + ", it has room for " +
           std::to_string(sizes_.max_rows) + " of " + std::to_string(sizes_.width);
  }
  cudaError_t error = cudaEventRecord(fork_, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, fork_, 0);
  if (error != cudaSuccess) return Failed("the fork", error);
  const CurrentDevice current(device_);
  const PeerTileCall own = Own(call);
  std::string problem = Mark(PeerPhase::kRowsIn);
  if (problem.empty()) problem = Pull(call, own);
  if (problem.empty()) problem = Compute(call, own);
  if (problem.empty()) problem = Mark(PeerPhase::kIdle);
  if (!problem.empty()) return problem;
  error = cudaEventRecord(join_, stream_);
  return error == cudaSuccess ? "" : Failed("the join", error);
}

std::string PeerTiles::Join(cudaStream_t stream) {
  const cudaError_t error = cudaStreamWaitEvent(stream, join_, 0);
  return error == cudaSuccess ? "" : Failed("the join", error);
}

std::string PeerTiles::Pull(const PeerTileCall& call, const PeerTileCall& to) {
  const int64_t most = MostTiles(call.num_rows * call.num_active, call.num_experts);
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
  return strata::Pull(pieces, numbers, stream_);
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
  gate.addresses = reinterpret_cast<uint64_t*>(memory_ + at.addresses);
  gate.num_rows = static_cast<int32_t>(call.num_rows);
  gate.num_experts = static_cast<int32_t>(call.num_experts);
  expert_tiles::TileParams up = {};
  up.groups = own.groups;
  up.live = own.live;
  up.num_rows = gate.num_rows;
  up.num_active = static_cast<int32_t>(call.num_active);
  up.in = own.in;
  up.out = QuantizedRows::At(memory_ + at.hidden, entries, call.routed->gate.rows);
  up.sums = call.sums;
  up.slice = static_cast<int32_t>(call.slice);
  expert_tiles::TileParams down = up;
  down.in = up.out;
  const int64_t groups = gate.ring.groups;
  const int64_t tiles =
      MostTiles(entries, std::min(call.num_experts, (call.num_experts + groups - 1) / groups));
  std::string error = ring_ == nullptr ? "" : TellRouting(gate, stream_);
  for (int64_t group = 0; group < groups && error.empty(); ++group) {
    const auto range = expert_tiles::RangeOf(call.num_experts, groups, group);
    const auto params = [&](const expert_tiles::TileParams& p, bool is_down) {
      return RoutedParams(p, *call.routed, gate.addresses, range, groups == 1, is_down);
    };
    error = Mark(PeerPhase::kWait);
    if (error.empty()) error = AwaitGroup(gate, group, stream_);
    if (error.empty()) error = Mark(PeerPhase::kGateUp);
    if (error.empty()) error = LaunchGateUp(params(up, false), tiles, stream_);
    if (error.empty()) error = Mark(PeerPhase::kDown);
    if (error.empty()) error = LaunchDown(params(down, true), tiles, stream_);
  }
  if (error.empty() && ring_ != nullptr) error = LeaveRing(gate, stream_);
  return error;
}

std::string PeerTiles::Warm(const ExpertShape& routed) {
  PeerTileCall call = {};
  call.routed = &routed;
  call.num_rows = sizes_.max_rows;
  call.num_active = sizes_.num_active;
  call.num_experts = sizes_.num_experts;
  call.slice = RoundUp(sizes_.width, 128);
  const PeerTileCall own = Own(call);
  const CurrentDevice current(device_);
  std::string error = Pull(own, own);  // of no row
  if (error.empty()) error = Compute(own, own);
  if (!error.empty()) return error;
  const cudaError_t done = cudaStreamSynchronize(stream_);
  return done == cudaSuccess ? "" : Failed("its kernels", done);
}

}  // namespace strata
