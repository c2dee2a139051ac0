// IQ types with a code book: blocks of 256 values, a whole segment each. An index picks a vector of
// 4 or 8 magnitudes, sign bits negate some of them (bit i for value i of the vector).
#include "common/code_tables.h"
#include "common/unpack_scalar.h"

namespace strata {
namespace {

// The bias plus or minus each byte of `magnitudes`; minus where the bit of `signs` is set.
template <typename Word>
void SignedCodes(Word magnitudes, unsigned signs, uint8_t* codes) {
  for (unsigned i = 0; i < sizeof(Word); ++i) {
    const int magnitude = static_cast<int>((magnitudes >> (8 * i)) & 0xff);
    codes[i] =
        static_cast<uint8_t>((signs >> i) & 1 ? kGridBias - magnitude : kGridBias + magnitude);
  }
}

// 7 stored sign bits to 8: the number of negatives in a vector is even.
unsigned EvenSigns(unsigned seven_bits) {
  return seven_bits | (static_cast<unsigned>(std::popcount(seven_bits)) & 1) << 7;
}

// IQ2_XXS: f16 d; per 32 values 4 index bytes and a u32 of 4 x 7 sign bits and a 4-bit scale s.
// D = d * (1 + 2 s) / 8.
void UnpackIQ2_XXS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const float d = LoadScale(block) * 0.125f;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* indices = block + 2 + 8 * b;
    const uint32_t word = Load32(indices + 4);
    out->d[b] = d * static_cast<float>(1 + 2 * (word >> 28));
    for (int v = 0; v < 4; ++v) {
      SignedCodes(kIq2XxsGrid.entries[indices[v]], EvenSigns((word >> (7 * v)) & 127),
                  out->codes + kBlock * b + 8 * v);
    }
  }
}

// d / 8 for every block, and factor 1 + 2 s per 16 values from the 8 nibble pairs of IQ2_XS and
// IQ2_S.
void SplitScales(float d, const uint8_t* nibbles, RowSegment* out) {
  for (int b = 0; b < kSegmentBlocks; ++b) {
    out->d[b] = d * 0.125f;
    out->k[2 * b] = static_cast<float>(1 + 2 * (nibbles[b] & 0x0f));
    out->k[2 * b + 1] = static_cast<float>(1 + 2 * (nibbles[b] >> 4));
  }
}

// IQ2_XS: f16 d; 32 u16 of a 9-bit index and 7 sign bits; 8 bytes of scales.
void UnpackIQ2_XS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  SplitScales(LoadScale(block), block + 66, out);
  for (int v = 0; v < kSegment / 8; ++v) {
    const unsigned word = Load16(block + 2 + 2 * v);
    SignedCodes(kIq2XsGrid.entries[word & 511], EvenSigns(word >> 9), out->codes + 8 * v);
  }
}

// IQ2_S: f16 d; 32 low index bytes; 32 sign bytes; 8 bytes of high index bits, 2 a vector; 8 bytes
// of scales.
void UnpackIQ2_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  SplitScales(LoadScale(block), block + 74, out);
  for (int v = 0; v < kSegment / 8; ++v) {
    const unsigned high = (block[66 + v / 4] >> (2 * (v % 4))) & 3u;
    SignedCodes(kIq2SGrid.entries[block[2 + v] | high << 8], block[34 + v], out->codes + 8 * v);
  }
}

// IQ3_XXS: f16 d; 64 index bytes; per 32 values a u32 of 4 x 7 sign bits and a 4-bit scale s.
// D = d * (1 + 2 s) / 4.
void UnpackIQ3_XXS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const float d = LoadScale(block) * 0.25f;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* indices = block + 2 + 8 * b;
    const uint32_t word = Load32(block + 66 + 4 * b);
    out->d[b] = d * static_cast<float>(1 + 2 * (word >> 28));
    for (int v = 0; v < 8; ++v) {
      const unsigned signs = EvenSigns((word >> (7 * (v / 2))) & 127) >> (4 * (v % 2));
      SignedCodes(kIq3XxsGrid.entries[indices[v]], signs, out->codes + kBlock * b + 4 * v);
    }
  }
}

// IQ3_S: f16 d; 64 low index bytes; 8 bytes of high index bits; 32 sign bytes; 4 bytes of scales s,
// a nibble per 32 values. D = d * (1 + 2 s).
void UnpackIQ3_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const float d = LoadScale(block);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const int scale = (block[106 + b / 2] >> (4 * (b % 2))) & 0x0f;
    out->d[b] = d * static_cast<float>(1 + 2 * scale);
  }
  for (int v = 0; v < kSegment / 4; ++v) {
    const unsigned high = (block[66 + v / 8] >> (v % 8)) & 1u;
    const unsigned signs = block[74 + v / 2] >> (4 * (v % 2));
    SignedCodes(kIq3SGrid.entries[block[2 + v] | high << 8], signs, out->codes + 4 * v);
  }
}

// Eight codes of an IQ1 vector: the code book holds 8 * value + bias, `shift` is +1 or -1.
void ShiftedCodes(unsigned index, int shift, uint8_t* codes) {
  const uint64_t word = kIq1Grid.entries[index];
  for (int i = 0; i < 8; ++i) {
    codes[i] = static_cast<uint8_t>(static_cast<int>((word >> (8 * i)) & 0xff) + shift);
  }
}

// IQ1_S: f16 d; 32 low index bytes; per 32 values a u16: 4 x 3 high index bits, 3-bit scale s, sign
// of the shift (set: -1). D = d * (1 + 2 s) / 8.
void UnpackIQ1_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const float d = LoadScale(block) * 0.125f;
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const unsigned word = Load16(block + 34 + 2 * b);
    out->d[b] = d * static_cast<float>(1 + 2 * ((word >> 12) & 7));
    for (int v = 0; v < 4; ++v) {
      const unsigned index = block[2 + 4 * b + v] | ((word >> (3 * v)) & 7) << 8;
      ShiftedCodes(index, word & 0x8000 ? -1 : 1, out->codes + kBlock * b + 8 * v);
    }
  }
}

// IQ1_M: 32 low index bytes; 16 bytes with a nibble per vector: 3 high index bits, sign of the
// shift; 4 u16: each 4 x 3-bit scales s, one per 16 values, and on top 4 bits of the f16 d, the
// lowest first. Factor 1 + 2 s, D = d / 8.
void UnpackIQ1_M(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const uint8_t* scales = block + 48;
  unsigned bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<unsigned>(scales[2 * i + 1] >> 4) << (4 * i);
  const uint8_t half[2] = {static_cast<uint8_t>(bits & 0xff), static_cast<uint8_t>(bits >> 8)};
  const float d = LoadScale(half) * 0.125f;
  for (int b = 0; b < kSegmentBlocks; ++b) out->d[b] = d;
  for (int group = 0; group < 2 * kSegmentBlocks; ++group) {
    const int scale = (Load16(scales + group / 4 * 2) >> (3 * (group % 4))) & 7;
    out->k[group] = static_cast<float>(1 + 2 * scale);
  }
  for (int v = 0; v < kSegment / 8; ++v) {
    const unsigned nibble = (block[32 + v / 2] >> (4 * (v % 2))) & 0x0fu;
    ShiftedCodes(block[v] | (nibble & 7) << 8, nibble & 8 ? -1 : 1, out->codes + 8 * v);
  }
}

}  // namespace

UnpackFn ScalarUnpackGrids(GgmlType type) {
  switch (type) {
    case GgmlType::kIQ2_XXS:
      return UnpackIQ2_XXS;
    case GgmlType::kIQ2_XS:
      return UnpackIQ2_XS;
    case GgmlType::kIQ2_S:
      return UnpackIQ2_S;
    case GgmlType::kIQ3_XXS:
      return UnpackIQ3_XXS;
    case GgmlType::kIQ3_S:
      return UnpackIQ3_S;
    case GgmlType::kIQ1_S:
      return UnpackIQ1_S;
    case GgmlType::kIQ1_M:
      return UnpackIQ1_M;
    default:
      return nullptr;
  }
}

}  // namespace strata
