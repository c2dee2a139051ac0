// Decoders of the IQ types with a code book, whose stored block is a whole segment. The stored
// forms are described in common/unpack_scalar_grids.cc, the order of bits in arrange.h. A book
// gives entry `index` as Word (4 values) or Pair (8 values).
//
// A negated byte is ~m + 1. The exclusive or with a mask of 0xff gives ~m; the mask itself, as a
// signed byte, is -1: so the second words of codes are the masks, to be subtracted.
#pragma once

#include "cuda/segments.cuh"

namespace strata {

// 1 + 2 s
__device__ __forceinline__ int OddScale(uint32_t s) { return static_cast<int>(2 * s + 1); }

// Split signs of the types that store 7 for 8 values: sets the four others, on bits 25 + 2v, so
// that the number of negatives in a vector is even.
__device__ __forceinline__ uint32_t EvenSigns(uint32_t word) {
  const uint32_t stored = word & 0x55ffffffu;
  uint32_t odd = stored ^ stored >> 16;
  odd ^= odd >> 8;  // bit i: of word i of the block
  odd ^= odd >> 1;  // bit 2v: of vector v
  return stored | (odd & 0x55u) << 25;
}

// The four bits that lie in their place.
__device__ __forceinline__ uint32_t SpareBits(uint32_t word) {
  uint32_t bits = word >> 25 & 0x55u;
  bits = (bits | bits >> 1) & 0x33u;
  return (bits | bits >> 2) & 0x0fu;
}

// 0xff in byte j where the sign of value 4i + j is set.
__device__ __forceinline__ uint32_t SignMask(uint32_t split, int i) {
  return Permute(split << (7 - i), 0, 0xba98);
}

// Word i of the codes, and the mask that makes up for it.
__device__ __forceinline__ void SignedWord(uint32_t magnitudes, uint32_t split, int i,
                                           uint32_t* w) {
  const uint32_t mask = SignMask(split, i);
  w[i] = magnitudes ^ mask;
  w[8 + i] = mask;
}

__device__ __forceinline__ void SignedPair(const uint2& magnitudes, uint32_t split, int v,
                                           uint32_t* w) {
  SignedWord(magnitudes.x, split, 2 * v, w);
  SignedWord(magnitudes.y, split, 2 * v + 1, w);
}

struct DecodeIQ2_XXS {
  static constexpr GgmlType kType = GgmlType::kIQ2_XXS;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = -1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    const int scale = OddScale(SpareBits(raw[2 * b + 1]));
    return __fmul_rn(__fmul_rn(HalfAt(raw, 64), 0.125f), __int2float_rn(scale));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t signs = EvenSigns(raw[2 * b + 1]);
#pragma unroll
    for (int v = 0; v < 4; ++v) SignedPair(book.Pair(ByteAt(raw, 8 * b + v)), signs, v, w);
  }
};

// The high bits of the indices lie in the signs' spare places.
struct DecodeIQ2_XS {
  static constexpr GgmlType kType = GgmlType::kIQ2_XS;
  static constexpr Form kForm = Form::kSplit;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = -1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    return __fmul_rn(HalfAt(raw, 72), 0.125f);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    return OddScale(raw[16 + g / 8] >> (4 * (g % 8)) & 15u);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t word = raw[2 * b + 1];
    const uint32_t signs = EvenSigns(word);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint32_t index = ByteAt(raw, 8 * b + v) | (word >> (17 + 2 * v) & 0x100u);
      SignedPair(book.Pair(index), signs, v, w);
    }
  }
};

struct DecodeIQ2_S {
  static constexpr GgmlType kType = GgmlType::kIQ2_S;
  static constexpr Form kForm = Form::kSplit;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = -1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    return __fmul_rn(HalfAt(raw, 80), 0.125f);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    return OddScale(raw[18 + g / 8] >> (4 * (g % 8)) & 15u);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t high = ByteAt(raw, 64 + b) << 8;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint32_t index = ByteAt(raw, 4 * b + v) | (high >> (2 * v) & 0x300u);
      SignedPair(book.Pair(index), raw[8 + b], v, w);
    }
  }
};

struct DecodeIQ3_XXS {
  static constexpr GgmlType kType = GgmlType::kIQ3_XXS;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = -1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    const int scale = OddScale(SpareBits(raw[16 + b]));
    return __fmul_rn(__fmul_rn(HalfAt(raw, 96), 0.25f), __int2float_rn(scale));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t signs = EvenSigns(raw[16 + b]);
#pragma unroll
    for (int i = 0; i < 8; ++i) SignedWord(book.Word(ByteAt(raw, 8 * b + i)), signs, i, w);
  }
};

// The book holds l of the magnitudes 2 l + 1: negated they are 2 (~l) + 1, so the signs cost one
// exclusive or and no carry.
struct DecodeIQ3_S {
  static constexpr GgmlType kType = GgmlType::kIQ3_S;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 2, kAdd = 1, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    // Twice the nibble, plus 1.
    const uint32_t twice = b == 0 ? raw[26] << 1 : raw[26] >> (4 * b - 1);
    return __fmul_rn(HalfAt(raw, 108), ToFloat((twice & 30u) | 1u));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t signs = raw[16 + b];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = raw[2 * b + i / 4];
      const uint32_t high = raw[24 + i / 4] >> b & 0x01010101u;
      // Byte i % 4 of both, and twice the sign of the second, which is 0.
      const uint32_t selector = 0xcc40u + 0x1111u * (i % 4);
      const uint32_t index = Permute(low, high, selector);
      w[i] = book.Word(index) ^ SignMask(signs, i);
    }
  }
};

// The book holds 8 * value + 64. The shift of a vector, +1 or -1, is added to all its values.
__device__ __forceinline__ void ShiftedPair(const uint2& codes, uint32_t negative, uint32_t* w) {
  const uint32_t shift = negative ? 0u - 0x01010101u : 0x01010101u;
  w[0] = codes.x + shift;
  w[1] = codes.y + shift;
}

struct DecodeIQ1_S {
  static constexpr GgmlType kType = GgmlType::kIQ1_S;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = -64, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    const int scale = OddScale(HalfWordAt(raw, 34 + 2 * b) >> 12 & 7u);
    return __fmul_rn(__fmul_rn(HalfAt(raw, 0), 0.125f), __int2float_rn(scale));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
    const uint32_t word = HalfWordAt(raw, 34 + 2 * b);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint32_t index = ByteAt(raw, 2 + 4 * b + v) | (word >> (3 * v) & 7u) << 8;
      ShiftedPair(book.Pair(index), word & 0x8000u, w + 2 * v);
    }
  }
};

struct DecodeIQ1_M {
  static constexpr GgmlType kType = GgmlType::kIQ1_M;
  static constexpr Form kForm = Form::kSplit;
  static constexpr int kMultiply = 1, kAdd = -64, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    const uint32_t bits = (raw[12] >> 12 & 0x000fu) | (raw[12] >> 24 & 0x00f0u) |
                          (raw[13] >> 4 & 0x0f00u) | (raw[13] >> 16 & 0xf000u);
    return __fmul_rn(HalfToFloat(bits), 0.125f);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    return OddScale(HalfWordAt(raw, 48 + g / 4 * 2) >> (3 * (g % 4)) & 7u);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book& book,
                                               uint32_t* w) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const uint32_t nibble = ByteAt(raw, 32 + 2 * b + v / 2) >> (4 * (v % 2)) & 15u;
      const uint32_t index = ByteAt(raw, 4 * b + v) | (nibble & 7u) << 8;
      ShiftedPair(book.Pair(index), nibble & 8u, w + 2 * v);
    }
  }
};

}  // namespace strata
