// Graph-safe. XLA's side of ngram_ask.

#include "common/check.h"
#include "cuda/device_table.h"
#include "cuda/handlers.h"
#include "cuda/ops/ngram_ask.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR1<ffi::S32> ids,
                  ffi::BufferR2<ffi::S32> tokens, ffi::BufferR0<ffi::S32> live,
                  ffi::ResultBufferR1<ffi::S32> passed, int64_t table,
                  ffi::Span<const int64_t> multipliers, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> sizes) {
  const auto held = FindDeviceTable(table);
  STRATA_CHECK_ARG("ngram_ask", held != nullptr, "table " + std::to_string(table) + " is closed");
  STRATA_CHECK_ARG("ngram_ask", held->reader() != nullptr,
                   "table " + std::to_string(table) + " is in memory, nobody can be asked");
  NgramAskArgs args = {};
  const std::string wrong = MakeNgramHash(multipliers, offsets, sizes, tokens.dimensions()[1],
                                          held->num_rows(), &args.hash);
  STRATA_CHECK_ARG("ngram_ask", wrong.empty(), wrong);
  const int64_t most = held->reader()->at().sizes.most_rows;
  STRATA_CHECK_ARG("ngram_ask", tokens.dimensions()[0] * args.hash.num_heads <= most,
                   std::to_string(tokens.dimensions()[0]) + " rows of " +
                       std::to_string(args.hash.num_heads) + " heads, a letter has room for " +
                       std::to_string(most) + " table rows");
  args.tokens = tokens.typed_data();
  args.live = live.typed_data();
  args.num_rows = static_cast<int32_t>(tokens.dimensions()[0]);
  args.mailbox = held->reader()->at();
  const cudaStream_t on = StreamOf(stream);
  // One buffer in a step that is donated; a call outside one has two.
  if (passed->untyped_data() != ids.untyped_data() && ids.size_bytes() > 0 &&
      cudaMemcpyAsync(passed->untyped_data(), ids.untyped_data(), ids.size_bytes(),
                      cudaMemcpyDeviceToDevice, on) != cudaSuccess) {
    return ffi::Error::Internal("ngram_ask: the ids could not be copied");
  }
  const std::string error = NgramAsk(args, on);
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("ngram_ask: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramAskFfi, Caught("ngram_ask", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()  // ids
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // tokens
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR1<ffi::S32>>()  // passed
                                  .Attr<int64_t>("table")
                                  .Attr<ffi::Span<const int64_t>>("multipliers")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<ffi::Span<const int64_t>>("sizes"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
