// Graph-safe. XLA's side of qsa_append.

#include "common/cells_ffi.h"
#include "common/check.h"
#include "cuda/handlers.h"
#include "cuda/ops/qsa_append.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

// Makes `to` hold the operand's values. In a donated step both are one buffer; where XLA could not
// alias them the operand is copied first.
template <typename From, typename To>
std::string Copied(const From& from, To& to, cudaStream_t stream) {
  if (to->untyped_data() == from.untyped_data() || from.size_bytes() == 0) return "";
  const cudaError_t error = cudaMemcpyAsync(to->untyped_data(), from.untyped_data(),
                                            from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::F32> proj,
                  ffi::BufferR1<ffi::F32> q_norm, ffi::BufferR1<ffi::F32> k_norm,
                  ffi::BufferR1<ffi::F32> index_q_norm, ffi::BufferR1<ffi::F32> index_k_norm,
                  ffi::BufferR1<ffi::F32> inv_freq, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::BufferR2<ffi::F32> index_raw, ffi::BufferR3<ffi::F32> index_keys,
                  ffi::BufferR3<ffi::F32> scales, ffi::BufferR0<ffi::S32> origin,
                  ffi::BufferR0<ffi::S32> pos, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR3<ffi::F32> q, ffi::ResultBufferR3<ffi::F32> index_q,
                  ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                  ffi::ResultBufferR2<ffi::F32> new_index_raw,
                  ffi::ResultBufferR3<ffi::F32> new_index_keys,
                  ffi::ResultBufferR3<ffi::F32> new_scales, int64_t ratio, float eps) {
  QsaAppendArgs args = {};
  STRATA_CHECK_ARG("qsa_append", IsCache(keys, values, scales, args.cells.type),
                   "shapes or types of keys, values and scales do not belong together");
  const int64_t cells = keys.dimensions()[0];
  const int64_t num_heads = q->dimensions()[1], num_kv_heads = keys.dimensions()[1];
  const int64_t head_dim = keys.dimensions()[2];
  const int64_t index_heads = index_q->dimensions()[1], index_dim = index_q->dimensions()[2];
  const int64_t rotated = 2 * inv_freq.dimensions()[0];
  const int64_t index_width = index_heads > 0 ? (index_heads + 1) * index_dim : 0;
  STRATA_CHECK_ARG(
      "qsa_append",
      proj.dimensions()[1] == 2 * (num_heads + num_kv_heads) * head_dim + index_width &&
          rotated <= head_dim && HasShape(q_norm, {head_dim}) && HasShape(k_norm, {head_dim}) &&
          (index_heads == 0 ||
           (rotated <= index_dim && ratio > 0 && HasShape(index_q_norm, {index_dim}) &&
            HasShape(index_k_norm, {index_dim}) && HasShape(index_raw, {cells, index_dim}) &&
            index_keys.dimensions()[0] * 16 * ratio >= cells &&
            index_keys.dimensions()[1] == index_dim && index_keys.dimensions()[2] == 16)),
      "shapes of proj, the norms, keys and the indexer's caches do not belong together");
  args.num_rows = static_cast<int>(proj.dimensions()[0]);
  args.num_cells = static_cast<int>(cells);
  args.num_heads = static_cast<int>(num_heads);
  args.num_kv_heads = static_cast<int>(num_kv_heads);
  args.head_dim = static_cast<int>(head_dim);
  args.index_heads = static_cast<int>(index_heads);
  args.index_dim = static_cast<int>(index_dim);
  args.ratio = static_cast<int>(ratio);
  args.rotated = static_cast<int>(rotated);
  args.eps = eps;
  args.proj = proj.typed_data();
  args.q_norm = q_norm.typed_data();
  args.k_norm = k_norm.typed_data();
  args.index_q_norm = index_q_norm.typed_data();
  args.index_k_norm = index_k_norm.typed_data();
  args.inv_freq = inv_freq.typed_data();
  args.pos = pos.typed_data();
  args.origin = origin.typed_data();
  args.live = live.typed_data();
  args.cells.keys = new_keys->untyped_data();
  args.cells.values = new_values->untyped_data();
  args.cells.scales = new_scales->typed_data();
  args.index_raw = new_index_raw->typed_data();
  args.index_keys = new_index_keys->typed_data();
  args.q = q->typed_data();
  args.index_q = index_q->typed_data();
  const cudaStream_t on = StreamOf(stream);
  std::string error = Copied(keys, new_keys, on);
  if (error.empty()) error = Copied(values, new_values, on);
  if (error.empty()) error = Copied(index_raw, new_index_raw, on);
  if (error.empty()) error = Copied(index_keys, new_index_keys, on);
  if (error.empty()) error = Copied(scales, new_scales, on);
  if (error.empty()) error = QsaAppend(args, on);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("qsa_append: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaAppendFfi, Caught("qsa_append", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
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
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
