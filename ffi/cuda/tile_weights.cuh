// Blocks of 32 weights as the matrix units take them: contract T's codes w as signed bytes, and
// what a block has besides.
#pragma once

#include "cuda/segments_body.cuh"

namespace strata::tiles {

// Segments of a tile whose weights are on their way to the L2 cache.
inline constexpr int kSegmentsAhead = 2;

// Copies of a type's code book in a block's shared memory, in at most 16 KiB: there is no room for
// more beside the stages, of which a multiprocessor has one block's or, smaller ones, two blocks'.
__host__ __device__ constexpr int BookCopies(GgmlType type) {
  int copies = GridCopies(type);
  while (copies > 1 && GridBytes(type, copies) > 16 * 1024) copies /= 2;
  return copies;
}

// Bytes added and subtracted without carries from one to the next.
__device__ __forceinline__ uint32_t AddBytes(uint32_t a, uint32_t b) {
  return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}
__device__ __forceinline__ uint32_t SubtractBytes(uint32_t a, uint32_t b) {
  return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}

// The 8 words of codes w of block b: kMultiply * (code + kSecond * second) + kAdd, byte by byte.
template <typename Decode, typename Raw, typename Book>
__device__ __forceinline__ void WeightWords(const Raw& raw, int b, const Book& book,
                                            uint32_t (&words)[8]) {
  constexpr int kMultiply = Decode::kMultiply, kAdd = Decode::kAdd, kSecond = Decode::kSecond;
  static_assert((kMultiply == 1 && (kSecond == 0 || kAdd == 0)) ||
                    (kMultiply == 2 && kSecond == 0 && (kAdd == 1 || kAdd == -1)),
                "a form of codes that is not handled here");
  uint32_t w[kSecond != 0 ? 16 : 8];
  Decode::Codes(raw, b, book, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t code = w[i];
    if constexpr (kSecond == 1) code = AddBytes(code, w[8 + i]);
    if constexpr (kSecond == -1) code = SubtractBytes(code, w[8 + i]);
    // 2 c + 1 of signed bytes has no carry; 2 c - 1 of 0 and 1 is 2 (c - 1) + 1.
    if constexpr (kMultiply == 2 && kAdd == -1) code = SubtractBytes(code, 0x01010101u);
    if constexpr (kMultiply == 2) code = (code << 1 & 0xfefefefeu) | 0x01010101u;
    // Codes of 0 to 127 and a shift down: it is added with 128 on top, whose bit is then turned.
    if constexpr (kMultiply == 1 && kAdd != 0) {
      code = (code + 0x01010101u * static_cast<uint32_t>(0x80 + kAdd)) ^ 0x80808080u;
    }
    words[i] = code;
  }
}

__host__ __device__ constexpr bool HasMinimum(Form form) {
  return form == Form::kMin || form == Form::kSplitMin;
}
__host__ __device__ constexpr bool IsSplit(Form form) {
  return form == Form::kSplit || form == Form::kSplitMin;
}

// A block's factors k of its two groups, and the n where it has some: floats, exact. A k has at
// most 8 bits and an n 4, so both fit a word as bfloat16.
__device__ __forceinline__ uint32_t PackFactors(int k, int n) {
  return (__float_as_uint(__int2float_rn(k)) & 0xffff0000u) |
         __float_as_uint(__int2float_rn(n)) >> 16;
}
__device__ __forceinline__ float FactorK(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}
__device__ __forceinline__ float FactorN(uint32_t packed) { return __uint_as_float(packed << 16); }

// What a block of weights has besides codes, as it lies in memory.
struct BlockFactors {
  float d;
  float m;              // types with minimums
  uint32_t factors[2];  // G = 16: of each group
};

template <typename Decode, typename Raw>
__device__ __forceinline__ BlockFactors LoadFactors(const Raw& raw, int b) {
  const BlockScales scales = LoadScales<Decode>(raw, b);
  BlockFactors f = {scales.d, 0.0f, {0u, 0u}};
  if constexpr (HasMinimum(Decode::kForm)) f.m = scales.m;
  if constexpr (Decode::kForm == Form::kSplit) {
    f.factors[0] = PackFactors(scales.k[0], 0);
    f.factors[1] = PackFactors(scales.k[1], 0);
  }
  if constexpr (Decode::kForm == Form::kSplitMin) {
    f.factors[0] = PackFactors(scales.k[0], scales.n[0]);
    f.factors[1] = PackFactors(scales.k[1], scales.n[1]);
  }
  return f;
}

// A code book where it lies in global memory.
struct GlobalBook {
  const uint32_t* words;
  __device__ __forceinline__ uint32_t Word(uint32_t index) const { return __ldg(words + index); }
  __device__ __forceinline__ uint2 Pair(uint32_t index) const {
    return __ldg(reinterpret_cast<const uint2*>(words) + index);
  }
};

}  // namespace strata::tiles
