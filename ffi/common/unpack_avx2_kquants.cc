// Q2_K to Q6_K and IQ4_XS; layouts are described in unpack_scalar_kquants.cc.
#include "common/code_tables.h"
#include "common/unpack_avx2.h"

namespace strata {
namespace {

// Run r of 32 values in a half: bits 2 r of 32 bytes.
template <int run>
__m256i TwoBitCodes(__m256i bytes) {
  return ShiftedBits<-2 * run>(bytes, 3);
}

void UnpackQ2_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreSame(LoadHalf(block + 80), out->d);
  StoreSame(-LoadHalf(block + 82), out->m);
  const __m128i nibble = _mm_set1_epi8(0x0f);
  const __m128i factors = Load16Bytes(block);
  StoreSignedFloats(_mm_and_si128(factors, nibble), out->k);
  StoreSignedFloats(_mm_and_si128(_mm_srli_epi16(factors, 4), nibble), out->n);
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = Load32Bytes(block + 16 + 32 * half);
    uint8_t* codes = out->codes + 128 * half;
    StoreCodes(TwoBitCodes<0>(bytes), codes);
    StoreCodes(TwoBitCodes<1>(bytes), codes + 32);
    StoreCodes(TwoBitCodes<2>(bytes), codes + 64);
    StoreCodes(TwoBitCodes<3>(bytes), codes + 96);
  }
}

// Block b of Q3_K: its pair of bits, and bit b of `high` as bit 2.
template <int b>
void StoreQ3_K(__m256i bytes, __m256i high, uint8_t* codes) {
  const __m256i third = ShiftedBits<2 - b>(high, 4);
  StoreCodes(_mm256_or_si256(TwoBitCodes<b % 4>(bytes), third), codes + b * kBlock);
}

void UnpackQ3_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreSame(LoadHalf(block + 108), out->d);
  // Groups 0 to 7 have their low bits in the low nibbles, groups 8 to 15 in the high ones.
  const uint64_t low = LoadWord<uint64_t>(block + 96);
  const uint64_t high = LoadWord<uint32_t>(block + 104);
  const uint64_t first = (high << 4 & 0x30303030) | (high << 2 & 0x30303030) << 32;
  const uint64_t second = (high & 0x30303030) | (high >> 2 & 0x30303030) << 32;
  const uint64_t nibble = 0x0f0f0f0f0f0f0f0f;
  const __m128i factors = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & nibble) | second),
                                         static_cast<int64_t>((low & nibble) | first));
  StoreSignedFloats(_mm_sub_epi8(factors, _mm_set1_epi8(32)), out->k);
  const __m256i top = Load32Bytes(block);
  const __m256i front = Load32Bytes(block + 32);
  StoreQ3_K<0>(front, top, out->codes);
  StoreQ3_K<1>(front, top, out->codes);
  StoreQ3_K<2>(front, top, out->codes);
  StoreQ3_K<3>(front, top, out->codes);
  const __m256i back = Load32Bytes(block + 64);
  StoreQ3_K<4>(back, top, out->codes);
  StoreQ3_K<5>(back, top, out->codes);
  StoreQ3_K<6>(back, top, out->codes);
  StoreQ3_K<7>(back, top, out->codes);
}

void ScalesAndMinimums(const uint8_t* header, RowSegment* out) {
  const uint64_t scales = LoadWord<uint32_t>(header + 4);
  const uint64_t minimums = LoadWord<uint32_t>(header + 8);
  const uint64_t rest = LoadWord<uint32_t>(header + 12);
  const uint64_t six = 0x3f3f3f3f;
  const uint64_t low = 0x0f0f0f0f;
  const uint64_t top = 0x30303030;
  const uint64_t all_scales = (scales & six) | ((rest & low) | (scales >> 2 & top)) << 32;
  const uint64_t all_minimums = (minimums & six) | ((rest >> 4 & low) | (minimums >> 2 & top))
                                                       << 32;
  const __m128i bytes =
      _mm_set_epi64x(static_cast<int64_t>(all_minimums), static_cast<int64_t>(all_scales));
  StoreScaled(_mm256_cvtepu8_epi32(bytes), LoadHalf(header), out->d);
  StoreScaled(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), LoadHalf(header + 2), out->m);
  const __m256 sign = _mm256_set1_ps(-0.0f);
  _mm256_storeu_ps(out->m, _mm256_xor_ps(_mm256_loadu_ps(out->m), sign));
}

void UnpackQ4_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  ScalesAndMinimums(block, out);
  for (int pair = 0; pair < 4; ++pair) {
    const __m256i bytes = Load32Bytes(block + 16 + 32 * pair);
    StoreCodes(ShiftedBits<0>(bytes, 0x0f), out->codes + 64 * pair);
    StoreCodes(ShiftedBits<-4>(bytes, 0x0f), out->codes + 64 * pair + 32);
  }
}

// Blocks 2 p and 2 p + 1 of Q5_K: nibbles, and bits 2 p and 2 p + 1 of `high` as bit 4.
template <int pair>
void StoreQ5_K(const uint8_t* block, __m256i high, uint8_t* codes) {
  const __m256i bytes = Load32Bytes(block + 48 + 32 * pair);
  const __m256i low_fifth = ShiftedBits<4 - 2 * pair>(high, 0x10);
  const __m256i high_fifth = ShiftedBits<3 - 2 * pair>(high, 0x10);
  StoreCodes(_mm256_or_si256(ShiftedBits<0>(bytes, 0x0f), low_fifth), codes + 64 * pair);
  StoreCodes(_mm256_or_si256(ShiftedBits<-4>(bytes, 0x0f), high_fifth), codes + 64 * pair + 32);
}

void UnpackQ5_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  ScalesAndMinimums(block, out);
  const __m256i high = Load32Bytes(block + 16);
  StoreQ5_K<0>(block, high, out->codes);
  StoreQ5_K<1>(block, high, out->codes);
  StoreQ5_K<2>(block, high, out->codes);
  StoreQ5_K<3>(block, high, out->codes);
}

void UnpackQ6_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreSame(LoadHalf(block + 208), out->d);
  StoreSignedFloats(Load16Bytes(block + 192), out->k);
  for (int half = 0; half < 2; ++half) {
    const __m256i first = Load32Bytes(block + 64 * half);
    const __m256i second = Load32Bytes(block + 64 * half + 32);
    const __m256i high = Load32Bytes(block + 128 + 32 * half);
    uint8_t* codes = out->codes + 128 * half;
    StoreCodes(_mm256_or_si256(ShiftedBits<0>(first, 0x0f), ShiftedBits<4>(high, 0x30)), codes);
    StoreCodes(_mm256_or_si256(ShiftedBits<0>(second, 0x0f), ShiftedBits<2>(high, 0x30)),
               codes + 32);
    StoreCodes(_mm256_or_si256(ShiftedBits<-4>(first, 0x0f), ShiftedBits<0>(high, 0x30)),
               codes + 64);
    StoreCodes(_mm256_or_si256(ShiftedBits<-4>(second, 0x0f), ShiftedBits<-2>(high, 0x30)),
               codes + 96);
  }
}

void UnpackIQ4_XS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const __m256i pair_at = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  const __m256i high = _mm256_set1_epi32(LoadWord<uint16_t>(block + 2));
  const __m256i four = EightNibbles(block + 4);
  const __m256i two = _mm256_and_si256(_mm256_srlv_epi32(high, pair_at), _mm256_set1_epi32(3));
  const __m256i scales = _mm256_or_si256(four, _mm256_slli_epi32(two, 4));
  StoreScaled(_mm256_sub_epi32(scales, _mm256_set1_epi32(32)), LoadHalf(block), out->d);
  const __m256i codes = _mm256_broadcastsi128_si256(Load16Bytes(kIq4Codes));
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const __m256i nibbles = NibbleCodes(Load16Bytes(block + 8 + 16 * b));
    StoreCodes(_mm256_shuffle_epi8(codes, nibbles), out->codes + b * kBlock);
  }
}

}  // namespace

UnpackFn Avx2UnpackKQuants(GgmlType type) {
  switch (type) {
    case GgmlType::kQ2_K:
      return UnpackQ2_K;
    case GgmlType::kQ3_K:
      return UnpackQ3_K;
    case GgmlType::kQ4_K:
      return UnpackQ4_K;
    case GgmlType::kQ5_K:
      return UnpackQ5_K;
    case GgmlType::kQ6_K:
      return UnpackQ6_K;
    case GgmlType::kIQ4_XS:
      return UnpackIQ4_XS;
    default:
      return nullptr;
  }
}

}  // namespace strata
