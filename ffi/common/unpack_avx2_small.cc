// Types with blocks of 32, 64 or 128 values; layouts are described in unpack_scalar_small.cc.
#include "common/code_tables.h"
#include "common/unpack_avx2.h"

namespace strata {
namespace {

void UnpackQ4_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 18) {
    out->d[b] = LoadHalf(blocks);
    StoreCodes(NibbleCodes(Load16Bytes(blocks + 2)), out->codes + b * kBlock);
  }
}

void UnpackQ4_1(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 20) {
    out->d[b] = LoadHalf(blocks);
    out->m[b] = LoadHalf(blocks + 2);
    StoreCodes(NibbleCodes(Load16Bytes(blocks + 4)), out->codes + b * kBlock);
  }
}

__m256i FiveBitCodes(const uint8_t* nibbles, uint32_t high) {
  const __m256i fifth = _mm256_and_si256(MaskFromBits(high), _mm256_set1_epi8(0x10));
  return _mm256_or_si256(NibbleCodes(Load16Bytes(nibbles)), fifth);
}

void UnpackQ5_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 22) {
    out->d[b] = LoadHalf(blocks);
    StoreCodes(FiveBitCodes(blocks + 6, LoadWord<uint32_t>(blocks + 2)), out->codes + b * kBlock);
  }
}

void UnpackQ5_1(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 24) {
    out->d[b] = LoadHalf(blocks);
    out->m[b] = LoadHalf(blocks + 2);
    StoreCodes(FiveBitCodes(blocks + 8, LoadWord<uint32_t>(blocks + 4)), out->codes + b * kBlock);
  }
}

void UnpackQ8_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x80));
  for (int b = 0; b < num_blocks; ++b, blocks += 34) {
    out->d[b] = LoadHalf(blocks);
    StoreCodes(_mm256_xor_si256(Load32Bytes(blocks + 2), bias), out->codes + b * kBlock);
  }
}

void UnpackIQ4_NL(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  const __m256i codes = _mm256_broadcastsi128_si256(Load16Bytes(kIq4Codes));
  for (int b = 0; b < num_blocks; ++b, blocks += 18) {
    out->d[b] = LoadHalf(blocks);
    const __m256i nibbles = NibbleCodes(Load16Bytes(blocks + 2));
    StoreCodes(_mm256_shuffle_epi8(codes, nibbles), out->codes + b * kBlock);
  }
}

void UnpackMXFP4(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  const __m256i codes = _mm256_broadcastsi128_si256(Load16Bytes(kMxfp4Codes));
  for (int b = 0; b < num_blocks; ++b, blocks += 17) {
    const uint32_t e = blocks[0];
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    std::memcpy(&out->d[b], &bits, sizeof bits);
    const __m256i nibbles = NibbleCodes(Load16Bytes(blocks + 1));
    StoreCodes(_mm256_shuffle_epi8(codes, nibbles), out->codes + b * kBlock);
  }
}

void UnpackQ1_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  const __m256i minus_one = _mm256_set1_epi8(kGridBias - 1);
  for (int b = 0; b < num_blocks; b += 4, blocks += 18) {
    _mm_storeu_ps(out->d + b, _mm_set1_ps(LoadHalf(blocks)));
    for (int part = 0; part < 4; ++part) {
      const __m256i mask = MaskFromBits(LoadWord<uint32_t>(blocks + 2 + 4 * part));
      const __m256i twice = _mm256_and_si256(mask, _mm256_set1_epi8(2));
      StoreCodes(_mm256_add_epi8(minus_one, twice), out->codes + (b + part) * kBlock);
    }
  }
}

void UnpackQ2_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  const __m256i minus_one = _mm256_set1_epi8(kGridBias - 1);
  for (int b = 0; b < num_blocks; b += 2, blocks += 18) {
    out->d[b] = out->d[b + 1] = LoadHalf(blocks);
    for (int part = 0; part < 2; ++part) {
      // A byte to four: bit pair i moves from bit 2 i to bit 8 i, that is up by 6 i.
      __m256i pairs = _mm256_cvtepu8_epi32(Load8Bytes(blocks + 2 + 8 * part));
      pairs = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 12));
      pairs = _mm256_or_si256(pairs, _mm256_slli_epi32(pairs, 6));
      const __m256i q = _mm256_and_si256(pairs, _mm256_set1_epi8(3));
      StoreCodes(_mm256_add_epi8(minus_one, q), out->codes + (b + part) * kBlock);
    }
  }
}

}  // namespace

UnpackFn Avx2UnpackSmall(GgmlType type) {
  switch (type) {
    case GgmlType::kQ4_0:
      return UnpackQ4_0;
    case GgmlType::kQ4_1:
      return UnpackQ4_1;
    case GgmlType::kQ5_0:
      return UnpackQ5_0;
    case GgmlType::kQ5_1:
      return UnpackQ5_1;
    case GgmlType::kQ8_0:
      return UnpackQ8_0;
    case GgmlType::kIQ4_NL:
      return UnpackIQ4_NL;
    case GgmlType::kMXFP4:
      return UnpackMXFP4;
    case GgmlType::kQ1_0:
      return UnpackQ1_0;
    case GgmlType::kQ2_0:
      return UnpackQ2_0;
    default:
      return nullptr;
  }
}

}  // namespace strata
