// Graph-safe. XLA's side of expert_ffn.

#include "common/check.h"
#include "cuda/file_stage.h"
#include "cuda/handlers.h"
#include "cuda/ops/expert_ffn.h"
#include "cuda/ops/expert_ffn_tiles.h"
#include "cuda/peer_store.h"
#include "cuda/peer_tiles.h"
#include "cuda/tile_rows.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

bool Fits(const ExpertFfnArgs& a) {
  return a.routed != nullptr && a.shared_gate != nullptr && a.shared_up != nullptr &&
         a.shared_down != nullptr && a.routed->gate.cols == a.width &&
         a.routed->up.cols == a.width && a.routed->down.rows == a.width &&
         a.routed->up.rows == a.routed->gate.rows && a.routed->down.cols == a.routed->gate.rows &&
         a.shared_gate->cols == a.width && a.shared_up->cols == a.width &&
         a.shared_down->rows == a.width && a.shared_up->rows == a.shared_gate->rows &&
         a.shared_down->cols == a.shared_gate->rows && a.routed->gate.rows % 32 == 0 &&
         a.shared_gate->rows % 32 == 0 && a.width % 32 == 0;
}

// The host computes for windows only: tiles read all its experts over the link.
void PassDoors(const DeviceStore& store, int64_t layer, ExpertFfnArgs* args) {
  const Doors& doors = *store.doors();
  const bool window = args->num_rows <= doors.window_rows;
  args->doors = true;
  args->peer_rows = store.peer() == nullptr ? nullptr : store.peer()->rows();
  args->homes = doors.homes;
  if (window) {
    args->mailbox = doors.mailbox;
    args->mailbox.layer = static_cast<int32_t>(layer);
    args->latch = store.LatchAfter(layer);
  }
  args->streamed = window ? doors.streamed.data() : doors.streamed_always.data();
}

bool IsTile(const ExpertFfnArgs& args) { return args.num_rows > kMostWindowRows; }

// Whether a tile's rows need the peer's kernels of windows: its experts are neither read where they
// lie nor come through a ring, and it has any.
bool NeedsPeer(const ExpertFfnArgs& args, const PeerStore& peer) {
  return !peer.is_reached() && !args.ring.is_far && args.num_rows <= peer.sizes().max_rows;
}

// The primary reads the peer's experts itself, or the peer's kernels for tiles compute: a tile uses
// each expert for many rows.
bool ReadsPeer(const ExpertFfnArgs& args, const PeerStore* peer) {
  return peer == nullptr || (IsTile(args) && !NeedsPeer(args, *peer));
}

// Whether kernels run that know of a ring.
bool GoesByTiles(const ExpertFfnArgs& args, const PeerStore* peer) {
  return IsTile(args) && ReadsPeer(args, peer) && HasExpertTiles(args);
}

std::string RunOn(ExpertFfnArgs args, PeerStore* peer, cudaStream_t on) {
  if (GoesByTiles(args, peer)) {
    if (peer != nullptr) {
      args.doors = false;
      args.peer_tiles = peer->tiles();
    }
    return ExpertFfnTiles(args, on);
  }
  if (peer != nullptr && ReadsPeer(args, peer)) {
    args.doors = false;
    peer = nullptr;
  }
  std::string error;
  if (peer != nullptr) {
    error = peer->ShareCard(&args);
    if (error.empty()) error = peer->Fork(args, on);
  }
  if (error.empty()) error = ExpertGateUp(args, on);
  // With a bell the second kernel waits for the rows itself, and what comes after it for the peer.
  const bool looks = args.bell.tellers > 0;
  if (error.empty() && peer != nullptr && !looks) error = peer->Join(on);
  if (error.empty()) error = ExpertDown(args, on);
  if (error.empty() && peer != nullptr && looks) error = peer->Join(on);
  return error;
}

// Around a layer of a tile: experts that stay in the file are read first.
std::string Run(const DeviceStore& store, int64_t layer, ExpertFfnArgs args, cudaStream_t on) {
  const bool staged = store.HasFiles(layer) && args.num_rows > store.doors()->window_rows;
  std::string error;
  if (staged) {
    args.stage = store.files()->at();
    const bool has_ring = args.ring.has_stager && GoesByTiles(args, store.peer());
    const int64_t most = has_ring ? args.ring.min_rows - 1 : args.num_rows;
    error = BeginTurn({args.stage, args.live, static_cast<int32_t>(most)}, on);
  }
  if (error.empty()) error = RunOn(args, store.peer(), on);
  if (error.empty() && staged) error = EndTurn(store.files()->at(), on);
  return error;
}

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::S32> ids,
                  ffi::BufferR2<ffi::F32> weights, ffi::BufferR1<ffi::F32> shared_weights,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> y,
                  ffi::ResultBufferR1<ffi::U8> workspace, int64_t store, int64_t tiers,
                  int64_t layer, ffi::Span<const int64_t> roles) {
  const auto held = FindDeviceStore(store);
  STRATA_CHECK_ARG("expert_ffn", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("expert_ffn", roles.size() == 6 && tiers == -1,
                   std::to_string(roles.size()) + " roles and tiers " + std::to_string(tiers) +
                       ", expected 6 and -1: on the device the store holds the experts");
  ExpertFfnArgs args = {};
  args.num_rows = x.dimensions()[0];
  args.width = x.dimensions()[1];
  args.num_active = ids.dimensions()[1];
  args.num_experts = held->num_experts();
  args.routed = held->GetExpertShape(layer);
  args.shared_gate = held->Get(roles[3], layer);
  args.shared_up = held->Get(roles[4], layer);
  args.shared_down = held->Get(roles[5], layer);
  STRATA_CHECK_ARG("expert_ffn", Fits(args),
                   "the matrices of layer " + std::to_string(layer) + " do not fit rows of " +
                       std::to_string(args.width) + " in whole blocks of 32");
  STRATA_CHECK_ARG("expert_ffn",
                   ids.dimensions()[0] == args.num_rows &&
                       HasShape(weights, {args.num_rows, args.num_active}) &&
                       HasShape(shared_weights, {args.num_rows}),
                   "shapes of x, ids, weights and shared_weights do not belong together");
  const int64_t hidden = std::max(args.routed->gate.rows, args.shared_gate->rows);
  const int64_t bytes = ExpertFfnWorkspace(args.num_rows, args.num_active, args.num_experts,
                                           args.width, hidden, held->HasWholeTiles());
  uint8_t* borrowed = held->ScratchOf(args.num_rows);
  const int64_t room =
      borrowed == nullptr ? static_cast<int64_t>(workspace->size_bytes()) : held->scratch_bytes();
  STRATA_CHECK_ARG(
      "expert_ffn", room >= bytes,
      "workspace of " + std::to_string(room) + " bytes, expected " + std::to_string(bytes));
  args.x = x.typed_data();
  args.ids = ids.typed_data();
  args.weights = weights.typed_data();
  args.shared_weights = shared_weights.typed_data();
  args.live = live.typed_data();
  args.y = y->typed_data();
  args.workspace = borrowed == nullptr ? workspace->typed_data() : borrowed;
  args.experts = held->experts(layer);
  args.usage = held->usage(layer);
  if (const Doors* doors = held->doors()) {
    STRATA_CHECK_ARG(
        "expert_ffn", args.num_active == doors->num_active && args.width == doors->width,
        "rows of " + std::to_string(args.width) + " with " + std::to_string(args.num_active) +
            " experts, the doors are for " + std::to_string(doors->width) + " with " +
            std::to_string(doors->num_active));
    PassDoors(*held, layer, &args);
  }
  if (held->ring() != nullptr) args.ring = held->ring()->At(layer);
  args.layer = layer;
  args.timeline = held->timeline();
  const std::string error = Run(*held, layer, args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("expert_ffn: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ExpertFfnFfi, Caught("expert_ffn", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // x
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // ids
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // weights
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // shared_weights
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // y
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("tiers")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
