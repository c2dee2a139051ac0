// Host op; not graph-safe. XLA's side of qsa_attend.

#include "common/cells_ffi.h"
#include "common/check.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/qsa_attend.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR3<ffi::F32> q, ffi::BufferR2<ffi::F32> proj, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, ffi::BufferR2<ffi::S32> blocks,
                  ffi::BufferR3<ffi::F32> scales, ffi::BufferR0<ffi::S32> pos,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> out, int64_t ratio) {
  const FloatMode mode;
  QsaAttendArgs args = {};
  STRATA_CHECK_ARG("qsa_attend", IsCache(keys, values, scales, args.cells.type),
                   "shapes or types of keys, values and scales do not belong together");
  args.num_rows = q.dimensions()[0];
  args.num_live = *live.typed_data();
  args.pos = *pos.typed_data();
  args.proj_stride = proj.dimensions()[1];
  args.num_heads = q.dimensions()[1];
  args.num_kv_heads = keys.dimensions()[1];
  args.head_dim = q.dimensions()[2];
  args.ratio = ratio;
  args.num_blocks = blocks.dimensions()[1];
  const int64_t cells = keys.dimensions()[0];
  STRATA_CHECK_ARG("qsa_attend",
                   args.num_live >= 0 && args.num_live <= args.num_rows && args.pos >= 0 &&
                       args.pos + args.num_live <= cells,
                   std::to_string(args.num_live) + " rows at position " + std::to_string(args.pos) +
                       ", the cache has " + std::to_string(cells) + " cells");
  STRATA_CHECK_ARG(
      "qsa_attend",
      ratio >= 0 && args.head_dim % 16 == 0 && args.num_kv_heads > 0 &&
          args.num_heads % args.num_kv_heads == 0 && keys.dimensions()[2] == args.head_dim &&
          proj.dimensions()[0] == args.num_rows && blocks.dimensions()[0] == args.num_rows &&
          args.proj_stride >= 2 * args.num_heads * args.head_dim,
      "shapes of q, proj, keys and blocks do not belong together");
  for (int64_t i = 0; ratio > 0 && i < args.num_live * args.num_blocks; ++i) {
    const int64_t block = blocks.typed_data()[i];
    const int64_t row = i / args.num_blocks;
    STRATA_CHECK_ARG("qsa_attend", block >= -1 && (block + 1) * ratio <= args.pos + row + 1,
                     "blocks[" + std::to_string(row) + ", " + std::to_string(i % args.num_blocks) +
                         "] is " + std::to_string(block) + ", not a complete block of that row");
  }
  for (int64_t t = 0; ratio > 0 && t < args.num_live; ++t) {
    STRATA_CHECK_ARG("qsa_attend",
                     (args.pos + t + 1) % ratio != 0 ||
                         (args.num_blocks > 0 && blocks.typed_data()[t * args.num_blocks] >= 0),
                     "row " + std::to_string(t) + " attends to no cell");
  }
  args.q = q.typed_data();
  args.proj = proj.typed_data();
  args.cells.keys = keys.untyped_data();
  args.cells.values = values.untyped_data();
  args.cells.scales = scales.typed_data();
  args.blocks = blocks.typed_data();
  args.out = out->typed_data();
  QsaAttend(args);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaAttendFfi, Caught("qsa_attend", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // q
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // proj
                                  .Arg<ffi::AnyBuffer>()           // keys
                                  .Arg<ffi::AnyBuffer>()           // values
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // blocks
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // pos
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("ratio"));

}  // namespace strata
