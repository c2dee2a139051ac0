// Q2_K to Q6_K: blocks of 256 values, a whole segment each; IQ4_XS, whose scales are of this kind.
#include "common/code_tables.h"
#include "common/unpack_scalar.h"

namespace strata {
namespace {

// Q2_K: 16 bytes (low nibble factor, high nibble minimum, per 16 values); 64 bytes of 2-bit codes;
// f16 d, f16 dmin. Within each half of 128 values, bits 2j of byte l are value 32 j + l.
void UnpackQ2_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const uint8_t* packed = block + 16;
  const float d = LoadScale(block + 80);
  const float m = -LoadScale(block + 82);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    out->d[b] = d;
    out->m[b] = m;
  }
  for (int group = 0; group < 2 * kSegmentBlocks; ++group) {
    out->k[group] = static_cast<float>(block[group] & 0x0f);
    out->n[group] = static_cast<float>(block[group] >> 4);
  }
  for (int b = 0; b < kSegmentBlocks; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      out->codes[b * kBlock + i] = (packed[b / 4 * 32 + i] >> (2 * (b % 4))) & 3;
    }
  }
}

// Q3_K: 32 bytes of high bits (bit b of byte l is for value 32 b + l); 64 bytes of 2-bit codes as
// Q2_K; 12 bytes with 16 factors of 6 bits; f16 d. w = q - 4, factor - 32.
// Factor g: low 4 bits in nibble g / 8 of byte g % 8, high 2 bits in byte 8 + g % 4 at 2 (g / 4).
void UnpackQ3_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const uint8_t* packed = block + 32;
  const uint8_t* factors = block + 96;
  const float d = LoadScale(block + 108);
  for (int b = 0; b < kSegmentBlocks; ++b) out->d[b] = d;
  for (int g = 0; g < 2 * kSegmentBlocks; ++g) {
    const int low = (factors[g % 8] >> (4 * (g / 8))) & 0x0f;
    const int high = (factors[8 + g % 4] >> (2 * (g / 4))) & 3;
    out->k[g] = static_cast<float>((low | high << 4) - 32);
  }
  for (int b = 0; b < kSegmentBlocks; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      const int low = (packed[b / 4 * 32 + i] >> (2 * (b % 4))) & 3;
      const int high = (block[i] >> b) & 1;
      out->codes[b * kBlock + i] = static_cast<uint8_t>(low | high << 2);
    }
  }
}

// Q4_K and Q5_K: 12 bytes with 8 scales and 8 minimums of 6 bits. The first four of each are the
// low 6 bits of bytes 0-3 and 4-7; the others have their low 4 bits in the nibbles of bytes 8-11
// and their high 2 bits on top of the first four.
void ScalesAndMinimums(const uint8_t* header, RowSegment* out) {
  const float d = LoadScale(header);
  const float dmin = LoadScale(header + 2);
  const uint8_t* packed = header + 4;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    int scale = packed[b] & 63;
    int minimum = packed[b + 4] & 63;
    if (b >= 4) {
      scale = (packed[b + 4] & 0x0f) | packed[b - 4] >> 6 << 4;
      minimum = packed[b + 4] >> 4 | packed[b] >> 6 << 4;
    }
    out->d[b] = d * static_cast<float>(scale);
    out->m[b] = -(dmin * static_cast<float>(minimum));
  }
}

// Q4_K: f16 d, f16 dmin; scales and minimums; 128 bytes. Of each 32 bytes the low nibbles are 32
// values and the high nibbles the next 32. w = q, D = d * scale, M = -(dmin * minimum).
void UnpackQ4_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  ScalesAndMinimums(block, out);
  const uint8_t* packed = block + 16;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      out->codes[b * kBlock + i] = (packed[b / 2 * 32 + i] >> (4 * (b % 2))) & 0x0f;
    }
  }
}

// Q5_K: as Q4_K, with 32 bytes of high bits (bit b of byte l is for value 32 b + l) before the
// nibbles.
void UnpackQ5_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  ScalesAndMinimums(block, out);
  const uint8_t* high = block + 16;
  const uint8_t* packed = block + 48;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      const int low = (packed[b / 2 * 32 + i] >> (4 * (b % 2))) & 0x0f;
      out->codes[b * kBlock + i] = static_cast<uint8_t>(low | ((high[i] >> b) & 1) << 4);
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 factors, f16 d; w = q - 32. In each
// half of 128 values, run r of 32 has its nibbles at 32 (r % 2), low for r < 2, and its pairs at
// bits 2 r.
void UnpackQ6_K(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const uint8_t* factors = block + 192;
  const float d = LoadScale(block + 208);
  for (int b = 0; b < kSegmentBlocks; ++b) out->d[b] = d;
  for (int group = 0; group < 2 * kSegmentBlocks; ++group) {
    out->k[group] = static_cast<float>(static_cast<int8_t>(factors[group]));
  }
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const int half = b / 4;
    const int run = b % 4;
    const uint8_t* nibbles = block + 64 * half + 32 * (run % 2);
    const uint8_t* pairs = block + 128 + 32 * half;
    for (int i = 0; i < kBlock; ++i) {
      const int low = (nibbles[i] >> (4 * (run / 2))) & 0x0f;
      const int high = (pairs[i] >> (2 * run)) & 3;
      out->codes[b * kBlock + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

// IQ4_XS: f16 d; u16 with the high 2 bits of 8 scales; 4 bytes with their low nibbles; per 32
// values 16 bytes of nibbles as IQ4_NL. D = d * (scale - 32).
void UnpackIQ4_XS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const float d = LoadScale(block);
  const int high = Load16(block + 2);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const int low = (block[4 + b / 2] >> (4 * (b % 2))) & 0x0f;
    const int scale = (low | ((high >> (2 * b)) & 3) << 4) - 32;
    out->d[b] = d * static_cast<float>(scale);
    const uint8_t* packed = block + 8 + 16 * b;
    for (int i = 0; i < 16; ++i) {
      out->codes[b * kBlock + i] = kIq4Codes[packed[i] & 0x0f];
      out->codes[b * kBlock + 16 + i] = kIq4Codes[packed[i] >> 4];
    }
  }
}

}  // namespace

UnpackFn ScalarUnpackKQuants(GgmlType type) {
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
