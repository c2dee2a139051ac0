// Decoders of the types with blocks of 32, 64 or 128 values. The stored form of each is described
// in common/unpack_scalar_small.cc, the order of bits in arrange.h.
#pragma once

#include "cuda/segments.cuh"

namespace strata {

// Low nibbles of 16 bytes at `offset`, then their high nibbles: values 0 to 31.
template <typename Raw>
__device__ __forceinline__ void NibbleWords(const Raw& raw, int offset, uint32_t* w) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t packed = WordAt(raw, offset + 4 * i);
    w[i] = packed & 0x0f0f0f0fu;
    w[4 + i] = packed >> 4 & 0x0f0f0f0fu;
  }
}

// Levels of 16 bytes of nibbles, split. A nibble selects one of 8 bytes, and with its high bit
// set the sign of that byte. So the low half of a table, looked up with the nibbles as they are,
// gives its level or a constant, and the high half, with the high bits flipped, the constant of its
// signs or a level: two words whose sum is the level if the constants are allowed for.
template <typename Raw>
__device__ __forceinline__ void LevelWords(const Raw& raw, int offset, const uint32_t (&low)[2],
                                           const uint32_t (&high)[2], uint32_t* w) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibbles = WordAt(raw, offset + 4 * i);
    const uint32_t flipped = nibbles ^ 0x88888888u;
    w[i] = Permute(low[0], low[1], nibbles);
    w[4 + i] = Permute(low[0], low[1], nibbles >> 16);
    w[8 + i] = Permute(high[0], high[1], flipped);
    w[12 + i] = Permute(high[0], high[1], flipped >> 16);
  }
}

// IQ4_NL and IQ4_XS: -127 -104 -83 -65 -49 -35 -22 -10, whose sign is the constant -1; and 1 13 25
// 38 53 69 89 113, each one more to make up for it, constant 0.
template <typename Raw>
__device__ __forceinline__ void Iq4Words(const Raw& raw, int offset, uint32_t* w) {
  constexpr uint32_t kLow[2] = {0xbfad9881u, 0xf6eaddcfu};
  constexpr uint32_t kHigh[2] = {0x271a0e02u, 0x725a4636u};
  LevelWords(raw, offset, kLow, kHigh, w);
}

struct DecodeQ4_0 {
  static constexpr GgmlType kType = GgmlType::kQ4_0;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = -8, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 18 * b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    NibbleWords(raw, 18 * b + 2, w);
  }
};

struct DecodeQ4_1 {
  static constexpr GgmlType kType = GgmlType::kQ4_1;
  static constexpr Form kForm = Form::kMin;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 20 * b);
  }
  template <typename Raw>
  __device__ __forceinline__ static float M(const Raw& raw, int b) {
    return HalfAt(raw, 20 * b + 2);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    NibbleWords(raw, 20 * b + 4, w);
  }
};

// Nibbles as Q4_0; bit i of the word at `high` is bit 4 of value i.
template <typename Raw>
__device__ __forceinline__ void FiveBitWords(const Raw& raw, int high, int nibbles, uint32_t* w) {
  const uint32_t bits = WordAt(raw, high);
  NibbleWords(raw, nibbles, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] |= SpreadBits(bits >> (4 * i), 4);
}

struct DecodeQ5_0 {
  static constexpr GgmlType kType = GgmlType::kQ5_0;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = -16, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 22 * b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    FiveBitWords(raw, 22 * b + 2, 22 * b + 6, w);
  }
};

struct DecodeQ5_1 {
  static constexpr GgmlType kType = GgmlType::kQ5_1;
  static constexpr Form kForm = Form::kMin;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 24 * b);
  }
  template <typename Raw>
  __device__ __forceinline__ static float M(const Raw& raw, int b) {
    return HalfAt(raw, 24 * b + 2);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    FiveBitWords(raw, 24 * b + 4, 24 * b + 8, w);
  }
};

struct DecodeQ8_0 {
  static constexpr GgmlType kType = GgmlType::kQ8_0;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 34 * b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = WordAt(raw, 34 * b + 2 + 4 * i);
  }
};

struct DecodeIQ4_NL {
  static constexpr GgmlType kType = GgmlType::kIQ4_NL;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 18 * b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    Iq4Words(raw, 18 * b + 2, w);
  }
};

// Both halves of the table are 0 1 2 3 4 6 8 12 with constant 0, and the second is subtracted.
struct DecodeMXFP4 {
  static constexpr GgmlType kType = GgmlType::kMXFP4;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = -1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    const uint32_t e = ByteAt(raw, 17 * b);
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    constexpr uint32_t kLevels[2] = {0x03020100u, 0x0c080604u};
    LevelWords(raw, 17 * b + 1, kLevels, kLevels, w);
  }
};

// Word i of the codes is bit i of every byte.
struct DecodeQ1_0 {
  static constexpr GgmlType kType = GgmlType::kQ1_0;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 2, kAdd = -1, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 18 * (b / 4));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    const uint32_t bits = WordAt(raw, 18 * (b / 4) + 2 + 4 * (b % 4));
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = bits >> i & 0x01010101u;
  }
};

// Word i of the codes is bits 2 (i % 4) of every byte of word i / 4.
struct DecodeQ2_0 {
  static constexpr GgmlType kType = GgmlType::kQ2_0;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = -1, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return HalfAt(raw, 18 * (b / 2));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t packed = WordAt(raw, 18 * (b / 2) + 2 + 8 * (b % 2) + i / 4 * 4);
      w[i] = packed >> (2 * (i % 4)) & 0x03030303u;
    }
  }
};

}  // namespace strata
