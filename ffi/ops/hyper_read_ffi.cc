// Host op; not graph-safe. XLA's side of hyper_read.

#include "common/check.h"
#include "common/in_place.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/hyper_read.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(ffi::BufferR3<ffi::F32> streams, ffi::BufferR2<ffi::F32> y,
                  ffi::BufferR2<ffi::F32> beta, ffi::BufferR2<ffi::F32> norm,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR3<ffi::F32> new_streams,
                  ffi::ResultBufferR2<ffi::F32> x, ffi::ResultBufferR2<ffi::F32> next_beta,
                  int64_t store, int64_t layer, ffi::Span<const int64_t> roles, float eps) {
  const FloatMode mode;
  const auto held = FindStore(store);
  STRATA_CHECK_ARG("hyper_read", held != nullptr, "store " + std::to_string(store) + " is closed");
  STRATA_CHECK_ARG("hyper_read", roles.size() == 3, "expected roles down, inject (or -1), up");
  HyperReadArgs args = {};
  args.num_rows = streams.dimensions()[0];
  args.num_streams = streams.dimensions()[1];
  args.width = streams.dimensions()[2];
  args.num_live = *live.typed_data();
  args.eps = eps;
  args.down = held->Get(roles[0], layer);
  args.inject = held->Get(roles[1], layer);
  args.up = held->Get(roles[2], layer);
  const int64_t wide = args.num_streams * args.width;
  STRATA_CHECK_ARG("hyper_read",
                   args.down != nullptr && args.up != nullptr && args.down->cols == wide &&
                       args.up->rows == wide && args.up->cols == args.down->rows &&
                       args.width % 16 == 0 && (args.inject != nullptr) == (roles[1] >= 0) &&
                       (args.inject == nullptr ||
                        (args.inject->cols == wide && args.inject->rows == args.num_streams)),
                   "the matrices of layer " + std::to_string(layer) + " do not fit " +
                       std::to_string(args.num_streams) + " streams of " +
                       std::to_string(args.width));
  STRATA_CHECK_ARG(
      "hyper_read", args.num_live >= 0 && args.num_live <= args.num_rows,
      std::to_string(args.num_live) + " live rows of " + std::to_string(args.num_rows));
  STRATA_CHECK_ARG("hyper_read",
                   HasShape(y, {args.num_rows, args.width}) &&
                       HasShape(beta, {args.num_rows, args.num_streams}) &&
                       HasShape(norm, {args.num_streams, args.width}),
                   "shapes of streams, y, beta and norm do not belong together");
  args.streams = InPlace(streams, new_streams);
  args.y = y.typed_data();
  args.beta = beta.typed_data();
  args.norm = norm.typed_data();
  args.x = x->typed_data();
  args.next_beta = next_beta->typed_data();
  HyperRead(args);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HyperReadFfi, Caught("hyper_read", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR3<ffi::F32>>()  // streams
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // y
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // beta
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // norm
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR3<ffi::F32>>()  // new_streams
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // x
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // next_beta
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("layer")
                                  .Attr<ffi::Span<const int64_t>>("roles")
                                  .Attr<float>("eps"));

}  // namespace strata
