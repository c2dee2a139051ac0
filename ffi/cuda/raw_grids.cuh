// raw_values.cuh for the types with a code book, and the choice among all types.
#pragma once

#include "cuda/raw_values.cuh"

namespace strata::raw {

// The code books in the device's memory.
__device__ const auto kBookIq2Xxs = kIq2XxsGrid;
__device__ const auto kBookIq2Xs = kIq2XsGrid;
__device__ const auto kBookIq2S = kIq2SGrid;
__device__ const auto kBookIq3Xxs = kIq3XxsGrid;
__device__ const auto kBookIq3S = kIq3SGrid;
__device__ const auto kBookIq1 = kIq1Grid;

// Byte i of an entry.
template <typename Word>
__device__ __forceinline__ int ByteOf(Word entry, int i) {
  return static_cast<int>(entry >> (8 * i) & 0xff);
}

// 7 stored sign bits to 8: the number of negatives in a vector is even.
__device__ __forceinline__ uint32_t EvenSigns(uint32_t seven_bits) {
  return seven_bits | (static_cast<uint32_t>(__popc(seven_bits)) & 1u) << 7;
}

__device__ __forceinline__ int Signed(int magnitude, uint32_t signs, int i) {
  return signs >> i & 1 ? -magnitude : magnitude;
}

__device__ __forceinline__ float IQ2_XXS(Bytes block, int i) {
  const Bytes indices = block + 2 + i / 32 * 8;
  const int v = i / 8 % 4;
  const uint32_t word = U32(indices + 4);
  const float eighth = __fmul_rn(Half(block), 0.125f);
  const float d = __fmul_rn(eighth, ToFloat(static_cast<int>(1 + 2 * (word >> 28))));
  const int magnitude = ByteOf(kBookIq2Xxs.entries[indices[v]], i % 8);
  return Plain(d, Signed(magnitude, EvenSigns(word >> (7 * v) & 127), i % 8));
}

// IQ2_XS and IQ2_S: a nibble of `scales` for 16 values.
__device__ __forceinline__ float SplitEighth(Bytes block, Bytes scales, int i, int w) {
  return Split(__fmul_rn(Half(block), 0.125f), 1 + 2 * Nibble(scales, i / 16), w);
}

__device__ __forceinline__ float IQ2_XS(Bytes block, int i) {
  const uint32_t word = U16(block + 2 + i / 8 * 2);
  const int magnitude = ByteOf(kBookIq2Xs.entries[word & 511], i % 8);
  return SplitEighth(block, block + 66, i, Signed(magnitude, EvenSigns(word >> 9), i % 8));
}

__device__ __forceinline__ float IQ2_S(Bytes block, int i) {
  const int v = i / 8;
  const int magnitude = ByteOf(kBookIq2S.entries[block[2 + v] | Pair(block + 66, v) << 8], i % 8);
  return SplitEighth(block, block + 74, i, Signed(magnitude, block[34 + v], i % 8));
}

__device__ __forceinline__ float IQ3_XXS(Bytes block, int i) {
  const int b = i / 32;
  const uint32_t word = U32(block + 66 + 4 * b);
  const float quarter = __fmul_rn(Half(block), 0.25f);
  const float d = __fmul_rn(quarter, ToFloat(static_cast<int>(1 + 2 * (word >> 28))));
  const int magnitude = ByteOf(kBookIq3Xxs.entries[block[2 + i / 4]], i % 4);
  const uint32_t signs = EvenSigns(word >> (7 * (i / 8 % 4)) & 127);
  return Plain(d, Signed(magnitude, signs, i % 8));
}

__device__ __forceinline__ float IQ3_S(Bytes block, int i) {
  const int v = i / 4;
  const float d = __fmul_rn(Half(block), ToFloat(1 + 2 * Nibble(block + 106, i / 32)));
  const int high = block[66 + v / 8] >> (v % 8) & 1;
  const int magnitude = ByteOf(kBookIq3S.entries[block[2 + v] | high << 8], i % 4);
  return Plain(d, Signed(magnitude, block[74 + i / 8], i % 8));
}

// The code book holds 8 * value + kGridBias; the shift is 1 or -1.
__device__ __forceinline__ int Iq1Code(int index, int i, bool down) {
  return ByteOf(kBookIq1.entries[index], i) - kGridBias + (down ? -1 : 1);
}

__device__ __forceinline__ float IQ1_S(Bytes block, int i) {
  const int v = i / 8;
  const int word = static_cast<int>(U16(block + 34 + i / 32 * 2));
  const float eighth = __fmul_rn(Half(block), 0.125f);
  const float d = __fmul_rn(eighth, ToFloat(1 + 2 * (word >> 12 & 7)));
  const int index = block[2 + v] | (word >> (3 * (v % 4)) & 7) << 8;
  return Plain(d, Iq1Code(index, i % 8, (word & 0x8000) != 0));
}

__device__ __forceinline__ float IQ1_M(Bytes block, int i) {
  const Bytes scales = block + 48;
  const int g = i / 16;
  uint32_t bits = 0;
  for (int j = 0; j < 4; ++j) bits |= uint32_t{scales[2 * j + 1]} >> 4 << (4 * j);
  const int scale = static_cast<int>(U16(scales + g / 4 * 2)) >> (3 * (g % 4)) & 7;
  const int v = i / 8;
  const int nibble = Nibble(block + 32, v);
  const int code = Iq1Code(block[v] | (nibble & 7) << 8, i % 8, (nibble & 8) != 0);
  return Split(__fmul_rn(HalfToFloat(bits), 0.125f), 1 + 2 * scale, code);
}

__device__ __forceinline__ float F32(Bytes block, int) { return __uint_as_float(U32(block)); }
__device__ __forceinline__ float F16(Bytes block, int) { return Half(block); }
__device__ __forceinline__ float BF16(Bytes block, int) { return Bf16ToFloat(U16(block)); }

template <GgmlType kType>
inline constexpr TypeInfo kInfo = *FindType(static_cast<int64_t>(kType));

// Value i of the row that begins at `row`, as DequantizeRow gives it.
__device__ __forceinline__ float ValueOfRow(GgmlType type, Bytes row, int i) {
  switch (type) {
#define STRATA_RAW_TYPE(name)                                      \
  case GgmlType::k##name: {                                        \
    constexpr int kValues = kInfo<GgmlType::k##name>.block_values; \
    constexpr int kBytes = kInfo<GgmlType::k##name>.block_bytes;   \
    return name(row + i / kValues * kBytes, i % kValues);          \
  }
    STRATA_RAW_TYPE(F32)
    STRATA_RAW_TYPE(F16)
    STRATA_RAW_TYPE(BF16)
    STRATA_RAW_TYPE(Q4_0)
    STRATA_RAW_TYPE(Q4_1)
    STRATA_RAW_TYPE(Q5_0)
    STRATA_RAW_TYPE(Q5_1)
    STRATA_RAW_TYPE(Q8_0)
    STRATA_RAW_TYPE(Q2_K)
    STRATA_RAW_TYPE(Q3_K)
    STRATA_RAW_TYPE(Q4_K)
    STRATA_RAW_TYPE(Q5_K)
    STRATA_RAW_TYPE(Q6_K)
    STRATA_RAW_TYPE(IQ2_XXS)
    STRATA_RAW_TYPE(IQ2_XS)
    STRATA_RAW_TYPE(IQ2_S)
    STRATA_RAW_TYPE(IQ3_XXS)
    STRATA_RAW_TYPE(IQ3_S)
    STRATA_RAW_TYPE(IQ1_S)
    STRATA_RAW_TYPE(IQ1_M)
    STRATA_RAW_TYPE(IQ4_NL)
    STRATA_RAW_TYPE(IQ4_XS)
    STRATA_RAW_TYPE(MXFP4)
    STRATA_RAW_TYPE(Q1_0)
    STRATA_RAW_TYPE(Q2_0)
#undef STRATA_RAW_TYPE
  }
  return 0.0f;
}

}  // namespace strata::raw
