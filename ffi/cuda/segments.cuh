// What the decoders of all GGUF types share: one lane's bytes of a unit, in registers or in memory,
// and words of four codes.
//
// A decoder (segments_small.cuh, segments_kquants.cuh, segments_grids.cuh) is a type with
//   kType, kForm             the type and its form
//   kMultiply, kAdd          the value w of contract T is kMultiply * code + kAdd for every code
//   kSecond                  0, or the weight of a second word of codes that is added to the first
//   Codes(raw, b, book, w)   8 words of four signed codes of block b, 8 more if kSecond != 0
//   D(raw, b), M(raw, b)     float32 scales of block b
//   K(raw, g), N(raw, g)     integer factors of group g of 16 values
// of which a form needs only some. `raw[i]` is word i of the segment. After unrolling every index
// is a constant, so the registers hold the bytes; in memory it may be a variable.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"
#include "cuda/launch.h"
#include "cuda/numerics.cuh"

namespace strata {

// Weights pass through once: they must not push activations and tables out of the L1 cache.
__device__ __forceinline__ uint4 LoadOnce(const uint4* address) {
#if defined(STRATA_EMULATE)
  return *address;
#else
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
#endif
}

__device__ __forceinline__ uint32_t LoadOnce(const uint32_t* address) {
#if defined(STRATA_EMULATE)
  return *address;
#else
  uint32_t v;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
#endif
}

// Tells the compiler that a pointer points into shared memory.
template <typename T>
__device__ __forceinline__ T* InShared(T* pointer) {
#if !defined(STRATA_EMULATE)
  __builtin_assume(__isShared(pointer));
#endif
  return pointer;
}

// Byte `nibble & 7` of the 8 bytes b:a for each nibble of the selector; where the nibble's high bit
// is set, that byte's sign, 0x00 or 0xff. The intrinsic would clear those bits.
__device__ __forceinline__ uint32_t Permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(STRATA_EMULATE)
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15u;
    const uint32_t word = nibble & 4u ? b : a;
    uint32_t byte = word >> (8 * (nibble & 3u)) & 0xffu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#endif
}

// One lane's words of a segment in registers.
template <int kWords>
struct RawWords {
  uint32_t words[kWords];
  __device__ __forceinline__ uint32_t operator[](int i) const { return words[i]; }
};

// 0, in a way that needs a word of every load. Added to an address of the activations, it keeps the
// arithmetic behind the last load: the compiler would issue some loads late to save registers, and
// each time the warp would wait for memory again. `even` is any even number it knows nothing of.
template <int kWords>
__device__ __forceinline__ int AfterLoads(const RawWords<kWords>& raw, int even) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kWords; i += 4) any |= raw.words[i];
#pragma unroll
  for (int i = kWords / 4 * 4 + 1; i < kWords; ++i) any |= raw.words[i];
  return static_cast<int>(any & 1u) & even;
}

// Makes the compiler forget what it knows of the words, at no cost: it would decode all blocks of a
// segment before a loop over activation rows and keep the codes in more registers than there are.
template <int kWords>
__device__ __forceinline__ void Forget(RawWords<kWords>* raw) {
#if !defined(STRATA_EMULATE)
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(raw->words[i]));
#else
  (void)raw;
#endif
}

// One lane's words read when asked for: for single values and segments of odd lengths.
struct PanelWords {
  const uint8_t* unit;
  int lane;
  int chunk_words;  // words that lie in chunks of 16 bytes
  __device__ __forceinline__ uint32_t operator[](int i) const {
    const int offset = i < chunk_words ? (i / 4 * 32 + lane) * 16 + i % 4 * 4
                                       : chunk_words * 128 + ((i - chunk_words) * 32 + lane) * 4;
    return *reinterpret_cast<const uint32_t*>(unit + offset);
  }
};

// A segment of a length known to the compiler.
template <int kWords>
__device__ __forceinline__ void LoadWords(const uint8_t* unit, int lane, RawWords<kWords>* raw) {
  const uint4* chunks = reinterpret_cast<const uint4*>(unit) + lane;
#pragma unroll
  for (int c = 0; c < kWords / 4; ++c) {
    const uint4 chunk = LoadOnce(chunks + c * 32);
    raw->words[4 * c] = chunk.x;
    raw->words[4 * c + 1] = chunk.y;
    raw->words[4 * c + 2] = chunk.z;
    raw->words[4 * c + 3] = chunk.w;
  }
  const uint32_t* rest = reinterpret_cast<const uint32_t*>(unit + kWords / 4 * 512) + lane;
#pragma unroll
  for (int i = 0; i < kWords % 4; ++i) raw->words[kWords / 4 * 4 + i] = LoadOnce(rest + i * 32);
}

// Four bytes at any offset of the segment.
template <typename Raw>
__device__ __forceinline__ uint32_t WordAt(const Raw& raw, int offset) {
  if (offset % 4 == 0) return raw[offset / 4];
  return __funnelshift_r(raw[offset / 4], raw[offset / 4 + 1], 8 * (offset % 4));
}

template <typename Raw>
__device__ __forceinline__ uint32_t ByteAt(const Raw& raw, int offset) {
  return Permute(raw[offset / 4], 0, 0x4440u + static_cast<uint32_t>(offset % 4));
}

// Two bytes at an even offset.
template <typename Raw>
__device__ __forceinline__ uint32_t HalfWordAt(const Raw& raw, int offset) {
  return raw[offset / 4] >> (8 * (offset % 4)) & 0xffffu;
}

template <typename Raw>
__device__ __forceinline__ float HalfAt(const Raw& raw, int offset) {
  return HalfToFloat(HalfWordAt(raw, offset));
}

// An integer scale as float, exact.
__device__ __forceinline__ float ToFloat(uint32_t integer) {
  return __int2float_rn(static_cast<int>(integer));
}

// Bits i of `bits` (0..3) to bit `to` of byte i.
__device__ __forceinline__ uint32_t SpreadBits(uint32_t bits, int to) {
  return (bits & 15u) * (0x00204081u << to) & 0x01010101u << to;
}

}  // namespace strata
