// Single values of GGUF blocks as files have them, for tables of which a step reads a few rows.
//
// Value i of a row is D * w, D * (k * w), and plus M or M * n where the type has minimums: the
// float32 operations of common/dequantize.cc, each rounded once. What lies where in a block is
// described beside the functions of common/unpack_scalar_*.cc that these follow: same names, the
// block's bytes and the value's number in the block. Bytes are read one by one: blocks have no
// alignment.
#pragma once

#include "common/code_tables.h"
#include "common/gguf_types.h"
#include "cuda/numerics.cuh"

namespace strata::raw {

using Bytes = const uint8_t*;

__device__ __forceinline__ uint32_t U16(Bytes at) { return at[0] | uint32_t{at[1]} << 8; }
__device__ __forceinline__ uint32_t U32(Bytes at) { return U16(at) | U16(at + 2) << 16; }
__device__ __forceinline__ float Half(Bytes at) { return HalfToFloat(U16(at)); }
__device__ __forceinline__ float ToFloat(int integer) { return __int2float_rn(integer); }

// Fields of `width` bits, counted from the low end of the first byte.
__device__ __forceinline__ int Nibble(Bytes at, int i) { return at[i / 2] >> (4 * (i % 2)) & 15; }
__device__ __forceinline__ int Pair(Bytes at, int i) { return at[i / 4] >> (2 * (i % 4)) & 3; }

// The low nibbles of 16 bytes are values 0 to 15, the high ones 16 to 31.
__device__ __forceinline__ int SplitNibble(Bytes at, int i) {
  return at[i % 16] >> (4 * (i / 16)) & 15;
}

__device__ __forceinline__ float Plain(float d, int w) { return __fmul_rn(d, ToFloat(w)); }
__device__ __forceinline__ float WithMinimum(float d, int w, float m) {
  return __fadd_rn(Plain(d, w), m);
}
__device__ __forceinline__ float Split(float d, int k, int w) {
  return __fmul_rn(d, __fmul_rn(ToFloat(k), ToFloat(w)));
}

// Eight of a table's 16 bytes, the first in the low end.
constexpr uint64_t EightCodes(const uint8_t (&codes)[16], int first) {
  uint64_t packed = 0;
  for (int i = 0; i < 8; ++i) packed |= uint64_t{codes[first + i]} << (8 * i);
  return packed;
}

inline constexpr uint64_t kIq4Low = EightCodes(kIq4Codes, 0), kIq4High = EightCodes(kIq4Codes, 8);
inline constexpr uint64_t kMxfp4Low = EightCodes(kMxfp4Codes, 0);
inline constexpr uint64_t kMxfp4High = EightCodes(kMxfp4Codes, 8);

__device__ __forceinline__ int Iq4Level(int nibble) {
  const uint64_t codes = nibble < 8 ? kIq4Low : kIq4High;
  return static_cast<int>(codes >> (8 * (nibble % 8)) & 0xff) - 128;
}

__device__ __forceinline__ int Mxfp4Level(int nibble) {
  const uint64_t codes = nibble < 8 ? kMxfp4Low : kMxfp4High;
  return static_cast<int>(codes >> (8 * (nibble % 8)) & 0xff) - kGridBias;
}

__device__ __forceinline__ float Q4_0(Bytes block, int i) {
  return Plain(Half(block), SplitNibble(block + 2, i) - 8);
}

__device__ __forceinline__ float Q4_1(Bytes block, int i) {
  return WithMinimum(Half(block), SplitNibble(block + 4, i), Half(block + 2));
}

__device__ __forceinline__ int FiveBits(Bytes high, Bytes nibbles, int i) {
  return SplitNibble(nibbles, i) | (high[i / 8] >> (i % 8) & 1) << 4;
}

__device__ __forceinline__ float Q5_0(Bytes block, int i) {
  return Plain(Half(block), FiveBits(block + 2, block + 6, i) - 16);
}

__device__ __forceinline__ float Q5_1(Bytes block, int i) {
  return WithMinimum(Half(block), FiveBits(block + 4, block + 8, i), Half(block + 2));
}

__device__ __forceinline__ float Q8_0(Bytes block, int i) {
  return Plain(Half(block), static_cast<int8_t>(block[2 + i]));
}

__device__ __forceinline__ float IQ4_NL(Bytes block, int i) {
  return Plain(Half(block), Iq4Level(SplitNibble(block + 2, i)));
}

__device__ __forceinline__ float MXFP4(Bytes block, int i) {
  const uint32_t e = block[0];
  const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  return Plain(d, Mxfp4Level(SplitNibble(block + 1, i)));
}

__device__ __forceinline__ float Q1_0(Bytes block, int i) {
  return Plain(Half(block), 2 * (block[2 + i / 8] >> (i % 8) & 1) - 1);
}

__device__ __forceinline__ float Q2_0(Bytes block, int i) {
  return Plain(Half(block), Pair(block + 2, i) - 1);
}

// Of 32 bytes for each 128 values, two bits of each byte for each 32.
__device__ __forceinline__ int RunPair(Bytes at, int i) {
  return at[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
}

__device__ __forceinline__ float Q2_K(Bytes block, int i) {
  const int scales = block[i / 16];
  const float minimum = __fmul_rn(-Half(block + 82), ToFloat(scales >> 4));
  return __fadd_rn(Split(Half(block + 80), scales & 15, RunPair(block + 16, i)), minimum);
}

__device__ __forceinline__ float Q3_K(Bytes block, int i) {
  const int g = i / 16;
  const Bytes factors = block + 96;
  const int low = factors[g % 8] >> (4 * (g / 8)) & 15;
  const int high = factors[8 + g % 4] >> (2 * (g / 4)) & 3;
  const int code = RunPair(block + 32, i) | (block[i % 32] >> (i / 32) & 1) << 2;
  return Split(Half(block + 108), (low | high << 4) - 32, code - 4);
}

// Q4_K and Q5_K, from a block's header.
__device__ __forceinline__ float ScaledWithMinimum(Bytes block, int b, int code) {
  const Bytes packed = block + 4;
  int scale = packed[b % 4] & 63;
  int minimum = packed[b % 4 + 4] & 63;
  if (b >= 4) {
    scale = (packed[b + 4] & 15) | packed[b - 4] >> 6 << 4;
    minimum = packed[b + 4] >> 4 | packed[b] >> 6 << 4;
  }
  const float d = __fmul_rn(Half(block), ToFloat(scale));
  return WithMinimum(d, code, -__fmul_rn(Half(block + 2), ToFloat(minimum)));
}

__device__ __forceinline__ float Q4_K(Bytes block, int i) {
  const int code = block[16 + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 15;
  return ScaledWithMinimum(block, i / 32, code);
}

__device__ __forceinline__ float Q5_K(Bytes block, int i) {
  const int low = block[48 + i / 64 * 32 + i % 32] >> (4 * (i / 32 % 2)) & 15;
  const int high = block[16 + i % 32] >> (i / 32) & 1;
  return ScaledWithMinimum(block, i / 32, low | high << 4);
}

__device__ __forceinline__ float Q6_K(Bytes block, int i) {
  const int half = i / 128;
  const int run = i / 32 % 4;
  const int low = block[64 * half + 32 * (run % 2) + i % 32] >> (4 * (run / 2)) & 15;
  const int high = block[128 + 32 * half + i % 32] >> (2 * run) & 3;
  const int factor = static_cast<int8_t>(block[192 + i / 16]);
  return Split(Half(block + 208), factor, (low | high << 4) - 32);
}

__device__ __forceinline__ float IQ4_XS(Bytes block, int i) {
  const int b = i / 32;
  const int scale = Nibble(block + 4, b) | Pair(block + 2, b) << 4;
  const float d = __fmul_rn(Half(block), ToFloat(scale - 32));
  return Plain(d, Iq4Level(SplitNibble(block + 8 + 16 * b, i % 32)));
}

}  // namespace strata::raw
