// Graph-safe. XLA's side of ngram_rows.

#include "common/check.h"
#include "cuda/device_table.h"
#include "cuda/handlers.h"
#include "cuda/ops/ngram_rows.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

ffi::Error Handle(StreamArgument stream, ffi::BufferR2<ffi::S32> tokens,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> out, int64_t table,
                  ffi::Span<const int64_t> multipliers, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> sizes) {
  const auto held = FindDeviceTable(table);
  STRATA_CHECK_ARG("ngram_rows", held != nullptr, "table " + std::to_string(table) + " is closed");
  STRATA_CHECK_ARG("ngram_rows", held->loaded(),
                   "table " + std::to_string(table) + " is not loaded");
  const int64_t num_heads = static_cast<int64_t>(sizes.size());
  const int64_t ngram_size = static_cast<int64_t>(multipliers.size());
  STRATA_CHECK_ARG("ngram_rows", held->num_cols() * num_heads == out->dimensions()[1],
                   "table " + std::to_string(table) + " has rows of " +
                       std::to_string(held->num_cols()) + " values, expected " +
                       std::to_string(num_heads) + " of them to make " +
                       std::to_string(out->dimensions()[1]));
  STRATA_CHECK_ARG("ngram_rows",
                   ngram_size >= 2 && offsets.size() == sizes.size() &&
                       num_heads % (ngram_size - 1) == 0 && tokens.dimensions()[1] == ngram_size,
                   "multipliers, offsets, sizes and tokens do not belong together");
  STRATA_CHECK_ARG("ngram_rows", ngram_size <= kMostNgramSize && num_heads <= kMostNgramHeads,
                   std::to_string(num_heads) + " heads of " + std::to_string(ngram_size) +
                       " tokens, at most " + std::to_string(kMostNgramHeads) + " of " +
                       std::to_string(kMostNgramSize) + " expected on a GPU");
  NgramRowsArgs args = {};
  for (int64_t j = 0; j < num_heads; ++j) {
    STRATA_CHECK_ARG("ngram_rows",
                     sizes[j] > 0 && sizes[j] <= held->num_rows() && offsets[j] >= 0 &&
                         offsets[j] <= held->num_rows() - sizes[j],
                     "head " + std::to_string(j) + " reaches past the table's " +
                         std::to_string(held->num_rows()) + " rows");
    args.heads[j] = {static_cast<uint64_t>(sizes[j]), offsets[j]};
  }
  for (int64_t n = 0; n < ngram_size; ++n) {
    args.multipliers[n] = static_cast<uint64_t>(multipliers[n]);
  }
  args.tokens = tokens.typed_data();
  args.live = live.typed_data();
  args.out = out->typed_data();
  args.rows = held->rows();
  args.type = held->type()->type;
  args.num_cols = static_cast<int32_t>(held->num_cols());
  args.row_bytes = static_cast<int32_t>(held->row_bytes());
  args.num_rows = static_cast<int32_t>(tokens.dimensions()[0]);
  args.ngram_size = static_cast<int32_t>(ngram_size);
  args.num_heads = static_cast<int32_t>(num_heads);
  args.heads_per_ngram = static_cast<int32_t>(num_heads / (ngram_size - 1));
  const std::string error = NgramRows(args, StreamOf(stream));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("ngram_rows: " + error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramRowsFfi, Caught("ngram_rows", Handle),
                              ffi::Ffi::Bind()
                                  .Ctx<StreamContext>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // tokens
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("table")
                                  .Attr<ffi::Span<const int64_t>>("multipliers")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<ffi::Span<const int64_t>>("sizes"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace strata
