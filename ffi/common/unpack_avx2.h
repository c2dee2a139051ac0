// What the files of the AVX2 unpackers share; they are split like the scalar ones, and give the
// same bytes and the same float bits.
//
// Only files compiled for AVX2 include this. Everything here is static: an inline function with a
// name of its own could replace the same function in a file compiled for older CPUs.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/unpack.h"

namespace strata {

// Null for types of other families.
UnpackFn Avx2UnpackSmall(GgmlType type);
UnpackFn Avx2UnpackKQuants(GgmlType type);
UnpackFn Avx2UnpackGrids(GgmlType type);

template <typename Word>
static inline Word LoadWord(const uint8_t* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

static inline __m128i Load16Bytes(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

static inline __m256i Load32Bytes(const uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

static inline __m128i Load8Bytes(const uint8_t* bytes) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
}

// The codes of one block of 32; `to` is a multiple of 32 bytes into RowSegment::codes.
static inline void StoreCodes(__m256i codes, uint8_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), codes);
}

// A stored half-precision scale.
static inline float LoadHalf(const uint8_t* bytes) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(LoadWord<uint16_t>(bytes))));
}

// Eight integers to floats, times d.
static inline void StoreScaled(__m256i integers, float d, float* to) {
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(integers)));
}

// 16 signed or unsigned bytes to floats.
static inline void StoreSignedFloats(__m128i bytes, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
  _mm256_storeu_ps(to + 8, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
}

// The same scale for all blocks of a segment.
static inline void StoreSame(float d, float* to) { _mm256_storeu_ps(to, _mm256_set1_ps(d)); }

// 0xff in byte i where bit i of `bits` is set.
static inline __m256i MaskFromBits(uint32_t bits) {
  const __m256i source = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101,
                                            0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), source);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
}

// Bits `mask` of every byte after a shift by `count` to the left (negative: right). A shift across
// bytes brings in bits that the mask removes.
template <int count>
static inline __m256i ShiftedBits(__m256i bytes, int mask) {
  __m256i shifted = bytes;
  if constexpr (count > 0) shifted = _mm256_slli_epi16(bytes, count);
  if constexpr (count < 0) shifted = _mm256_srli_epi16(bytes, -count);
  return _mm256_and_si256(shifted, _mm256_set1_epi8(static_cast<char>(mask)));
}

// Low nibbles of 16 bytes, then their high nibbles.
static inline __m256i NibbleCodes(__m128i bytes) {
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return _mm256_and_si256(both, _mm256_set1_epi8(0x0f));
}

// Eight 4-bit fields of 4 bytes, the low nibble of each byte first.
static inline __m256i EightNibbles(const uint8_t* bytes) {
  const __m256i at = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i packed = _mm256_set1_epi32(LoadWord<int32_t>(bytes));
  return _mm256_and_si256(_mm256_srlv_epi32(packed, at), _mm256_set1_epi32(15));
}

// 7 sign bits in each byte (bit 7 clear) to 8: the number of negatives in a vector is even.
static inline __m256i EvenSigns(__m256i seven_bits) {
  const char odd = static_cast<char>(0x80);
  const __m256i parity = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, odd, odd, 0, odd, 0, 0, odd, odd, 0, 0, odd, 0, odd, odd, 0));
  const __m256i folded = _mm256_xor_si256(seven_bits, _mm256_srli_epi16(seven_bits, 4));
  const __m256i nibble = _mm256_and_si256(folded, _mm256_set1_epi8(0x0f));
  return _mm256_or_si256(seven_bits, _mm256_shuffle_epi8(parity, nibble));
}

// Eight words of 4 x 7 sign bits to 32 sign bytes.
static inline __m256i SignsOfWords(__m256i words) {
  const auto field = [&](int v, __m256i shifted) {
    return _mm256_and_si256(shifted, _mm256_set1_epi32(0x7f << (8 * v)));
  };
  const __m256i low = _mm256_or_si256(field(0, words), field(1, _mm256_slli_epi32(words, 1)));
  const __m256i high =
      _mm256_or_si256(field(2, _mm256_slli_epi32(words, 2)), field(3, _mm256_slli_epi32(words, 3)));
  return EvenSigns(_mm256_or_si256(low, high));
}

// 1 + 2 s for eight scales.
static inline __m256i OddScales(__m256i scales) {
  return _mm256_add_epi32(_mm256_add_epi32(scales, scales), _mm256_set1_epi32(1));
}

// Factors 1 + 2 s of IQ2_XS and IQ2_S from 8 bytes of nibble pairs, the low one first.
static inline void StoreSplitScales(float d, const uint8_t* nibbles, RowSegment* out) {
  StoreSame(d * 0.125f, out->d);
  const __m128i bytes = Load8Bytes(nibbles);
  const __m128i pairs = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));
  const __m128i scales = _mm_and_si128(pairs, _mm_set1_epi8(0x0f));
  StoreSignedFloats(_mm_add_epi8(_mm_add_epi8(scales, scales), _mm_set1_epi8(1)), out->k);
}

}  // namespace strata
