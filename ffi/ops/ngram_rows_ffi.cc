// Host op; not graph-safe. XLA's side of ngram_rows.

#include "common/check.h"
#include "common/numerics.h"
#include "ops/handlers.h"
#include "ops/ngram_rows.h"

namespace strata {
namespace {

namespace ffi = xla::ffi;

std::span<const int64_t> Plain(ffi::Span<const int64_t> span) {
  return {span.begin(), span.size()};
}

ffi::Error Handle(ffi::BufferR2<ffi::S32> tokens, ffi::AnyBuffer streams,
                  ffi::BufferR0<ffi::S32> live, ffi::ResultBufferR2<ffi::F32> out, int64_t table,
                  ffi::Span<const int64_t> multipliers, ffi::Span<const int64_t> offsets,
                  ffi::Span<const int64_t> sizes) {
  static_cast<void>(streams);  // it is there: that is all it is for
  const FloatMode mode;
  const auto held = FindTable(table);
  STRATA_CHECK_ARG("ngram_rows", held != nullptr, "table " + std::to_string(table) + " is closed");
  const int64_t num_heads = static_cast<int64_t>(sizes.size());
  STRATA_CHECK_ARG("ngram_rows", held->num_cols() * num_heads == out->dimensions()[1],
                   "table " + std::to_string(table) + " has rows of " +
                       std::to_string(held->num_cols()) + " values, expected " +
                       std::to_string(num_heads) + " of them to make " +
                       std::to_string(out->dimensions()[1]));
  STRATA_CHECK_ARG("ngram_rows",
                   multipliers.size() >= 2 && offsets.size() == sizes.size() &&
                       num_heads % (static_cast<int64_t>(multipliers.size()) - 1) == 0 &&
                       tokens.dimensions()[1] == static_cast<int64_t>(multipliers.size()),
                   "multipliers, offsets, sizes and tokens do not belong together");
  for (int64_t j = 0; j < num_heads; ++j) {
    STRATA_CHECK_ARG("ngram_rows",
                     sizes[j] > 0 && sizes[j] <= held->num_rows() && offsets[j] >= 0 &&
                         offsets[j] <= held->num_rows() - sizes[j],
                     "head " + std::to_string(j) + " reaches past the table's " +
                         std::to_string(held->num_rows()) + " rows");
  }
  const int64_t num_rows = tokens.dimensions()[0];
  const int64_t num_live = *live.typed_data();
  STRATA_CHECK_ARG("ngram_rows", num_live >= 0 && num_live <= num_rows,
                   std::to_string(num_live) + " live rows of " + std::to_string(num_rows));
  const int64_t ngram_size = tokens.dimensions()[1];
  for (int64_t i = 0; i < num_live * ngram_size; ++i) {
    STRATA_CHECK_ARG("ngram_rows", tokens.typed_data()[i] >= 0,
                     "tokens[" + std::to_string(i / ngram_size) + ", " +
                         std::to_string(i % ngram_size) + "] is " +
                         std::to_string(tokens.typed_data()[i]) + ", expected 0 or more");
  }
  const std::string wrong =
      NgramRows({tokens.typed_data(), out->typed_data(), num_rows, num_live, Plain(multipliers),
                 Plain(offsets), Plain(sizes), held.get()});
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::Internal("ngram_rows: " + wrong);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NgramRowsFfi, Caught("ngram_rows", Handle),
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR2<ffi::S32>>()  // tokens
                                  .Arg<ffi::AnyBuffer>()           // streams
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // live
                                  .Ret<ffi::BufferR2<ffi::F32>>()  // out
                                  .Attr<int64_t>("table")
                                  .Attr<ffi::Span<const int64_t>>("multipliers")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<ffi::Span<const int64_t>>("sizes"));

}  // namespace strata
