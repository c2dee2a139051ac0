// Graph-safe. XLA's side of ngram_rows.

#include "common/check.h"
#include "cuda/device_table.h"
#include "cuda/handlers.h"
#include "cuda/ops/ngram_rows.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::S32> tokens, ffi::AnyBuffer streams,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> out, int64_t table,
                  ffi::Span<const int64_t> multipliers, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> sizes) {
  static_cast<void>(streams);  // it is there: that is all it is for
  const auto held = FindDeviceTable(table);
  STRATA_CHECK_ARG("ngram_rows", held != nullptr, "table " + std::to_string(table) + " is closed");
  STRATA_CHECK_ARG("ngram_rows", held->loaded(),
                   "table " + std::to_string(table) + " is not loaded");
  const int64_t num_heads = static_cast<int64_t>(sizes.size());
  STRATA_CHECK_ARG("ngram_rows", held->num_cols() * num_heads == out->dimensions()[1],
                   "table " + std::to_string(table) + " has rows of " +
                       std::to_string(held->num_cols()) + " values, expected " +
                       std::to_string(num_heads) + " of them to make " +
                       std::to_string(out->dimensions()[1]));
  NgramRowsArgs args = {};
  const std::string wrong = MakeNgramHash(multipliers, offsets, sizes, tokens.dimensions()[1],
                                          held->num_rows(), &args.hash);
  STRATA_CHECK_ARG("ngram_rows", wrong.empty(), wrong);
  args.tokens = tokens.typed_data();
  args.live = live.typed_data();
  args.out = out->typed_data();
  args.rows = held->rows();
  if (held->reader() != nullptr) args.mailbox = held->reader()->at();
  args.type = held->type()->type;
  args.num_cols = static_cast<int32_t>(held->num_cols());
  args.row_bytes = static_cast<int32_t>(held->row_bytes());
  args.num_rows = static_cast<int32_t>(tokens.dimensions()[0]);
  const std::string error = NgramRows(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("ngram_rows: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramRowsFfi, Caught("ngram_rows", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // tokens
                                  .Arg<ffi::AnyBuffer>()           // streams
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("table")
                                  .Attr<ffi::Span<const int64_t>>("multipliers")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<ffi::Span<const int64_t>>("sizes"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
