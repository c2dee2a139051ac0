// Graph-safe. XLA's side of qsa_attend.

#include <algorithm>

#include "common/cells_ffi.h"
#include "common/check.h"
#include "cuda/device_store.h"
#include "cuda/handlers.h"
#include "cuda/ops/qsa_attend.h"
#include "cuda/peer_attention.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR3<ffi::F32> q, ffi::BufferR2<ffi::F32> proj,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::BufferR2<ffi::S32> blocks,
                  ffi::BufferR3<ffi::F32> scales, ffi::BufferR0<ffi::S32> pos,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> out,
                  ffi::ResultBufferR1<ffi::U8> workspace, int64_t store, int64_t ratio) {
  QsaAttendArgs args = {};
  STRATA_CHECK_ARG("qsa_attend", IsCache(keys, values, scales, args.cells.type),
                   "shapes or types of keys, values and scales do not belong together");
  const int64_t num_rows = q.dimensions()[0], num_heads = q.dimensions()[1];
  const int64_t head_dim = q.dimensions()[2], num_kv_heads = keys.dimensions()[1];
  const int64_t cells = keys.dimensions()[0], num_blocks = blocks.dimensions()[1];
  STRATA_CHECK_ARG("qsa_attend",
                   ratio >= 0 && head_dim % 16 == 0 && num_kv_heads > 0 &&
                       num_heads % num_kv_heads == 0 && keys.dimensions()[2] == head_dim &&
                       proj.dimensions()[0] == num_rows && blocks.dimensions()[0] == num_rows &&
                       proj.dimensions()[1] >= 2 * num_heads * head_dim &&
                       HasShape(*out, {num_rows, num_heads * head_dim}),
                   "shapes of q, proj, keys and blocks do not belong together");
  STRATA_CHECK_ARG("qsa_attend", head_dim > 0 && head_dim <= kMostAttendDim,
                   "heads of " + std::to_string(head_dim) + " values, at most " +
                       std::to_string(kMostAttendDim) + " expected on a GPU");
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) *
                            QsaAttendRowFloats(num_heads, head_dim, cells, num_blocks, ratio);
  const int64_t bytes = workspace->dimensions()[0];
  STRATA_CHECK_ARG("qsa_attend", bytes >= row_bytes,
                   "workspace of " + std::to_string(bytes) + " bytes, expected at least the " +
                       std::to_string(row_bytes) + " of one row's partial sums");
  args.q = q.typed_data();
  args.proj = proj.typed_data();
  args.cells.keys = keys.untyped_data();
  args.cells.values = values.untyped_data();
  args.cells.scales = scales.typed_data();
  args.blocks = blocks.typed_data();
  args.pos = pos.typed_data();
  args.live = live.typed_data();
  args.out = out->typed_data();
  args.workspace = reinterpret_cast<float*>(workspace->typed_data());
  args.num_rows = static_cast<int>(num_rows);
  args.rows_at_once = static_cast<int>(std::min(bytes / row_bytes, num_rows));
  args.num_cells = static_cast<int>(cells);
  args.proj_stride = proj.dimensions()[1];
  args.num_heads = static_cast<int>(num_heads);
  args.num_kv_heads = static_cast<int>(num_kv_heads);
  args.head_dim = static_cast<int>(head_dim);
  args.ratio = static_cast<int>(ratio);
  args.num_blocks = static_cast<int>(num_blocks);
  PeerAttention* peer = PeersAttention(store);
  const std::string error = peer != nullptr && peer->Takes(args)
                                ? peer->Attend(args, StreamOf(stream))
                                : QsaAttend(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("qsa_attend: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaAttendFfi, Caught("qsa_attend", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // q
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // proj
                                  .Arg<ffi::AnyBuffer>()           // keys
                                  .Arg<ffi::AnyBuffer>()           // values
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // blocks
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // pos
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Ret<ffi::BufferR1<ffi::U8>>()   // workspace
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("ratio"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
