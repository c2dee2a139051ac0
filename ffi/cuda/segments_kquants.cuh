// Decoders of Q2_K to Q6_K and IQ4_XS, whose stored block is a whole segment. The stored forms are
// described in common/unpack_scalar_kquants.cc.
#pragma once

#include "cuda/segments.cuh"
#include "cuda/segments_small.cuh"

namespace strata {

// Bits [2 (b % 4), +2) of 8 words from `offset` in the 32 bytes of block b's half: Q2_K, Q3_K.
template <typename Raw>
__device__ __forceinline__ uint32_t TwoBitWord(const Raw& raw, int offset, int b, int i) {
  return raw[offset / 4 + b / 4 * 8 + i] >> (2 * (b % 4)) & 0x03030303u;
}

struct DecodeQ2_K {
  static constexpr GgmlType kType = GgmlType::kQ2_K;
  static constexpr Form kForm = Form::kSplitMin;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    return HalfAt(raw, 80);
  }
  template <typename Raw>
  __device__ __forceinline__ static float M(const Raw& raw, int) {
    return -HalfAt(raw, 82);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    return static_cast<int>(ByteAt(raw, g) & 15u);
  }
  template <typename Raw>
  __device__ __forceinline__ static int N(const Raw& raw, int g) {
    return static_cast<int>(ByteAt(raw, g) >> 4);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = TwoBitWord(raw, 16, b, i);
  }
};

struct DecodeQ3_K {
  static constexpr GgmlType kType = GgmlType::kQ3_K;
  static constexpr Form kForm = Form::kSplit;
  static constexpr int kMultiply = 1, kAdd = -4, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    return HalfAt(raw, 108);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    const uint32_t low = ByteAt(raw, 96 + g % 8) >> (4 * (g / 8)) & 15u;
    const uint32_t high = ByteAt(raw, 104 + g % 4) >> (2 * (g / 4)) & 3u;
    return static_cast<int>(low | high << 4) - 32;
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = TwoBitWord(raw, 32, b, i) | (raw[i] >> b & 0x01010101u) << 2;
    }
  }
};

// What Q4_K and Q5_K begin with: d, dmin, 8 scales and 8 minimums of 6 bits. Words 1 and 2 hold the
// first four of each in their low 6 bits; word 3 the low 4 bits of the others, scales in the low
// nibbles, whose high 2 bits are on top of words 1 and 2.
template <typename Raw>
__device__ __forceinline__ float ScaleOf(const Raw& raw, int b) {
  const uint32_t scale =
      b < 4 ? ByteAt(raw, 4 + b) & 63u : (ByteAt(raw, 8 + b) & 15u) | ByteAt(raw, b) >> 6 << 4;
  return __fmul_rn(HalfAt(raw, 0), ToFloat(scale));
}

template <typename Raw>
__device__ __forceinline__ float MinimumOf(const Raw& raw, int b) {
  const uint32_t minimum =
      b < 4 ? ByteAt(raw, 8 + b) & 63u : ByteAt(raw, 8 + b) >> 4 | ByteAt(raw, 4 + b) >> 6 << 4;
  return -__fmul_rn(HalfAt(raw, 2), ToFloat(minimum));
}

struct DecodeQ4_K {
  static constexpr GgmlType kType = GgmlType::kQ4_K;
  static constexpr Form kForm = Form::kMin;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return ScaleOf(raw, b);
  }
  template <typename Raw>
  __device__ __forceinline__ static float M(const Raw& raw, int b) {
    return MinimumOf(raw, b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = raw[4 + b / 2 * 8 + i] >> (4 * (b % 2)) & 0x0f0f0f0fu;
  }
};

struct DecodeQ5_K {
  static constexpr GgmlType kType = GgmlType::kQ5_K;
  static constexpr Form kForm = Form::kMin;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    return ScaleOf(raw, b);
  }
  template <typename Raw>
  __device__ __forceinline__ static float M(const Raw& raw, int b) {
    return MinimumOf(raw, b);
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = (raw[12 + b / 2 * 8 + i] >> (4 * (b % 2)) & 0x0f0f0f0fu) |
             (raw[4 + i] >> b & 0x01010101u) << 4;
    }
  }
};

// In each half of 128 values, run r of 32 has its nibbles at 32 (r % 2), low for r < 2, and its
// pairs at bits 2 r.
struct DecodeQ6_K {
  static constexpr GgmlType kType = GgmlType::kQ6_K;
  static constexpr Form kForm = Form::kSplit;
  static constexpr int kMultiply = 1, kAdd = -32, kSecond = 0;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int) {
    return HalfAt(raw, 208);
  }
  template <typename Raw>
  __device__ __forceinline__ static int K(const Raw& raw, int g) {
    return static_cast<int8_t>(ByteAt(raw, 192 + g));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    const int half = b / 4;
    const int run = b % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = (raw[16 * half + 8 * (run % 2) + i] >> (4 * (run / 2)) & 0x0f0f0f0fu) |
             (raw[32 + 8 * half + i] >> (2 * run) & 0x03030303u) << 4;
    }
  }
};

// Nibbles split as those of IQ4_NL.
struct DecodeIQ4_XS {
  static constexpr GgmlType kType = GgmlType::kIQ4_XS;
  static constexpr Form kForm = Form::kPlain;
  static constexpr int kMultiply = 1, kAdd = 0, kSecond = 1;
  template <typename Raw>
  __device__ __forceinline__ static float D(const Raw& raw, int b) {
    const uint32_t low = raw[1] >> (4 * b) & 15u;
    const uint32_t high = raw[0] >> (16 + 2 * b) & 3u;
    const int scale = static_cast<int>(low | high << 4) - 32;
    return __fmul_rn(HalfAt(raw, 0), __int2float_rn(scale));
  }
  template <typename Raw, typename Book>
  __device__ __forceinline__ static void Codes(const Raw& raw, int b, const Book&, uint32_t* w) {
    Iq4Words(raw, 8 + 16 * b, w);
  }
};

}  // namespace strata
