// Graph-safe. XLA's side of qsa_select.

#include <algorithm>

#include "common/check.h"
#include "cuda/device_store.h"
#include "cuda/handlers.h"
#include "cuda/ops/qsa_select.h"
#include "cuda/peer_attention.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR3<ffi::F32> index_q,
                  ffi::BufferR3<ffi::F32> index_keys, ffi::BufferR0<ffi::S32> pos,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::S32> blocks,
                  ffi::ResultBufferR1<ffi::U8> workspace, int64_t store, int64_t ratio) {
  STRATA_CHECK_ARG("qsa_select", ratio > 0 && blocks->dimensions()[1] > 0,
                   std::to_string(blocks->dimensions()[1]) + " blocks of " + std::to_string(ratio) +
                       " cells, expected at least 1 of 1");
  const int64_t num_rows = index_q.dimensions()[0], groups = index_keys.dimensions()[0];
  STRATA_CHECK_ARG("qsa_select",
                   index_q.dimensions()[2] == index_keys.dimensions()[1] &&
                       index_keys.dimensions()[2] == 16 && index_q.dimensions()[2] % 2 == 0 &&
                       blocks->dimensions()[0] == num_rows && groups > 0,
                   "shapes of index_q and index_keys do not belong together");
  const int64_t row_bytes = groups * 16 * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t bytes = workspace->dimensions()[0];
  STRATA_CHECK_ARG("qsa_select", bytes >= row_bytes,
                   "workspace of " + std::to_string(bytes) + " bytes, expected at least the " +
                       std::to_string(row_bytes) + " of one row's scores");
  QsaSelectArgs args = {};
  args.index_q = index_q.typed_data();
  args.index_keys = index_keys.typed_data();
  args.pos = pos.typed_data();
  args.live = live.typed_data();
  args.blocks = blocks->typed_data();
  args.scores = reinterpret_cast<uint32_t*>(workspace->typed_data());
  args.num_rows = static_cast<int>(num_rows);
  args.rows_at_once = static_cast<int>(std::min(bytes / row_bytes, num_rows));
  args.index_heads = static_cast<int>(index_q.dimensions()[1]);
  args.index_dim = static_cast<int>(index_q.dimensions()[2]);
  args.num_groups = static_cast<int>(groups);
  args.ratio = static_cast<int>(ratio);
  args.num_blocks = static_cast<int>(blocks->dimensions()[1]);
  PeerAttention* peer = PeersAttention(store);
  const std::string error = peer != nullptr && peer->Takes(args)
                                ? peer->Select(args, StreamOf(stream))
                                : QsaSelect(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("qsa_select: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaSelectFfi, Caught("qsa_select", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // index_q
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // index_keys
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // pos
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // blocks
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("ratio"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
