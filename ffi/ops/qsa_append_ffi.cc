// Host op; not graph-safe. XLA's side of qsa_append.

#include "common/cells_ffi.h"
#include "common/check.h"
#include "common/in_place.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/qsa_append.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR2<ffi::F32> proj, ffi::BufferR1<ffi::F32> q_norm,
                  ffi::BufferR1<ffi::F32> k_norm, ffi::BufferR1<ffi::F32> index_q_norm,
                  ffi::BufferR1<ffi::F32> index_k_norm, ffi::BufferR1<ffi::F32> inv_freq,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::BufferR2<ffi::F32> index_raw,
                  ffi::BufferR3<ffi::F32> index_keys, ffi::BufferR3<ffi::F32> scales,
                  ffi::BufferR0<ffi::S32> origin, ffi::BufferR0<ffi::S32> pos,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR3<ffi::F32> q,
                  ffi::ResultBufferR3<ffi::F32> index_q, ffi::Result<ffi::AnyBuffer> new_keys,
                  ffi::Result<ffi::AnyBuffer> new_values,
                  ffi::ResultBufferR2<ffi::F32> new_index_raw,
                  ffi::ResultBufferR3<ffi::F32> new_index_keys,
                  ffi::ResultBufferR3<ffi::F32> new_scales, int64_t ratio, float eps) {
  const FloatMode mode;
  QsaAppendArgs args = {};
  STRATA_CHECK_ARG("qsa_append", IsCache(keys, values, scales, args.cells.type),
                   "shapes or types of keys, values and scales do not belong together");
  args.num_rows = proj.dimensions()[0];
  args.num_live = *live.typed_data();
  args.pos = *pos.typed_data();
  args.origin = *origin.typed_data();
  args.num_heads = q->dimensions()[1];
  args.num_kv_heads = keys.dimensions()[1];
  args.head_dim = keys.dimensions()[2];
  args.index_heads = index_q->dimensions()[1];
  args.index_dim = index_q->dimensions()[2];
  args.ratio = ratio;
  args.rotated = 2 * inv_freq.dimensions()[0];
  args.eps = eps;
  const int64_t cells = keys.dimensions()[0];
  STRATA_CHECK_ARG("qsa_append",
                   args.num_live >= 0 && args.num_live <= args.num_rows && args.pos >= 0 &&
                       args.pos + args.num_live <= cells,
                   std::to_string(args.num_live) + " rows at position " + std::to_string(args.pos) +
                       ", the cache has " + std::to_string(cells) + " cells");
  const int64_t index_width = args.index_heads > 0 ? (args.index_heads + 1) * args.index_dim : 0;
  STRATA_CHECK_ARG(
      "qsa_append",
      proj.dimensions()[1] ==
              (2 * args.num_heads + 2 * args.num_kv_heads) * args.head_dim + index_width &&
          args.rotated <= args.head_dim && HasShape(q_norm, {args.head_dim}) &&
          HasShape(k_norm, {args.head_dim}) &&
          (args.index_heads == 0 ||
           (args.rotated <= args.index_dim && ratio > 0 &&
            HasShape(index_q_norm, {args.index_dim}) && HasShape(index_k_norm, {args.index_dim}) &&
            HasShape(index_raw, {cells, args.index_dim}) &&
            index_keys.dimensions()[0] * 16 * ratio >= cells &&
            index_keys.dimensions()[1] == args.index_dim && index_keys.dimensions()[2] == 16)),
      "shapes of proj, the norms, keys and the indexer's caches do not belong together");
  args.proj = proj.typed_data();
  args.q_norm = q_norm.typed_data();
  args.k_norm = k_norm.typed_data();
  args.index_q_norm = index_q_norm.typed_data();
  args.index_k_norm = index_k_norm.typed_data();
  args.inv_freq = inv_freq.typed_data();
  args.cells.keys = InPlaceBytes(keys, new_keys);
  args.cells.values = InPlaceBytes(values, new_values);
  args.cells.scales = InPlace(scales, new_scales);
  args.index_raw = InPlace(index_raw, new_index_raw);
  args.index_keys = InPlace(index_keys, new_index_keys);
  args.q = q->typed_data();
  args.index_q = index_q->typed_data();
  QsaAppend(args);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaAppendFfi, Caught("qsa_append", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // proj
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // q_norm
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // k_norm
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // index_q_norm
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // index_k_norm
                                  .Arg<ffi::BufferR1<ffi::F32>>()  // inv_freq
                                  .Arg<ffi::AnyBuffer>()           // keys
                                  .Arg<ffi::AnyBuffer>()           // values
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // index_raw
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // index_keys
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // origin
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // pos
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // q
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // index_q
                                  .Ret<ffi::AnyBuffer>()           // new_keys
                                  .Ret<ffi::AnyBuffer>()           // new_values
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // new_index_raw
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_index_keys
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_scales
                                  .Attr<int64_t>("ratio")
                                  .Attr<float>("eps"));

}  // namespace strata
