// Which rows of the n-gram table the heads read for a row's tokens (ops/ngram_rows.h).
//
// Nothing on the device can refuse a token that is no id, so a negative one counts by its bits
// modulo 2^64: it reads some row of its head, never another place.
#pragma once

#include <cstdint>
#include <string>

namespace strata {

inline constexpr int kMostNgramSize = 8;
inline constexpr int kMostNgramHeads = 64;

// What a head reads: hash mod size + offset, in rows.
struct NgramHead {
  uint64_t size;
  int64_t offset;
};

struct NgramHash {
  int32_t ngram_size;       // N, 2 to kMostNgramSize
  int32_t num_heads;        // W, at most kMostNgramHeads
  int32_t heads_per_ngram;  // W / (N-1)
  uint64_t multipliers[kMostNgramSize];
  NgramHead heads[kMostNgramHeads];
};

// From an op's attributes; returns what is wrong with them, or an empty string. `tokens_width`:
// what a row of tokens has; `num_rows`: of the table.
template <typename Span>
std::string MakeNgramHash(const Span& multipliers, const Span& offsets, const Span& sizes,
                          int64_t tokens_width, int64_t num_rows, NgramHash* hash) {
  const int64_t num_heads = static_cast<int64_t>(sizes.size());
  const int64_t ngram_size = static_cast<int64_t>(multipliers.size());
  if (ngram_size < 2 || offsets.size() != sizes.size() || num_heads % (ngram_size - 1) != 0 ||
      tokens_width != ngram_size) {
    return "multipliers, offsets, sizes and tokens do not belong together";
  }
  if (ngram_size > kMostNgramSize || num_heads > kMostNgramHeads) {
    return std::to_string(num_heads) + " heads of " + std::to_string(ngram_size) +
           " tokens, at most " + std::to_string(kMostNgramHeads) + " of " +
           std::to_string(kMostNgramSize) + " expected on a GPU";
  }
  *hash = {};
  for (int64_t j = 0; j < num_heads; ++j) {
    if (sizes[j] <= 0 || sizes[j] > num_rows || offsets[j] < 0 ||
        offsets[j] > num_rows - sizes[j]) {
      return "head " + std::to_string(j) + " reaches past the table's " + std::to_string(num_rows) +
             " rows";
    }
    hash->heads[j] = {static_cast<uint64_t>(sizes[j]), offsets[j]};
  }
  for (int64_t n = 0; n < ngram_size; ++n) {
    hash->multipliers[n] = static_cast<uint64_t>(multipliers[n]);
  }
  hash->ngram_size = static_cast<int32_t>(ngram_size);
  hash->num_heads = static_cast<int32_t>(num_heads);
  hash->heads_per_ngram = static_cast<int32_t>(num_heads / (ngram_size - 1));
  return "";
}

#if defined(__CUDACC__) || defined(STRATA_EMULATE)
// The row that a head reads for the tokens of one row.
__device__ __forceinline__ int64_t TableRow(const NgramHash& of, const int32_t* tokens, int head) {
  const int last = head / of.heads_per_ngram + 1;
  uint64_t hash = 0;
  for (int n = 0; n <= last; ++n) {
    hash ^= static_cast<uint64_t>(static_cast<int64_t>(tokens[n])) * of.multipliers[n];
  }
  return static_cast<int64_t>(hash % of.heads[head].size) + of.heads[head].offset;
}
#endif

}  // namespace strata
