// Host op; not graph-safe. XLA's side of qsa_select.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/qsa_select.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR3<ffi::F32> index_q, ffi::BufferR3<ffi::F32> index_keys,
                  ffi::BufferR0<ffi::S32> pos, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR2<ffi::S32> blocks, int64_t ratio) {
  const FloatMode mode;
  const int64_t num_rows = index_q.dimensions()[0];
  const int64_t num_live = *live.typed_data();
  STRATA_CHECK_ARG("qsa_select", ratio > 0 && blocks->dimensions()[1] > 0,
                   std::to_string(blocks->dimensions()[1]) + " blocks of " + std::to_string(ratio) +
                       " cells, expected at least 1 of 1");
  STRATA_CHECK_ARG("qsa_select",
                   num_live >= 0 && num_live <= num_rows && *pos.typed_data() >= 0 &&
                       (*pos.typed_data() + num_live) / ratio <= index_keys.dimensions()[0] * 16,
                   std::to_string(num_live) + " rows at position " +
                       std::to_string(*pos.typed_data()) + " reach past the cache");
  STRATA_CHECK_ARG("qsa_select",
                   index_q.dimensions()[2] == index_keys.dimensions()[1] &&
                       index_keys.dimensions()[2] == 16 && index_q.dimensions()[2] % 2 == 0,
                   "shapes of index_q and index_keys do not belong together");
  QsaSelect({index_q.typed_data(), index_keys.typed_data(), blocks->typed_data(), num_rows,
             num_live, *pos.typed_data(), index_q.dimensions()[1], index_q.dimensions()[2], ratio,
             blocks->dimensions()[1]});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QsaSelectFfi, Caught("qsa_select", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // index_q
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // index_keys
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // pos
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::S32>>()  // blocks
                                  .Attr<int64_t>("ratio"));

}  // namespace strata
