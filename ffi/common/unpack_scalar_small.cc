// Types with blocks of 32, 64 or 128 values. A segment may hold fewer than 8 blocks of 32.
#include "common/code_tables.h"
#include "common/unpack_scalar.h"

namespace strata {
namespace {

// Q4_0: f16 d; 16 bytes. Low nibbles are values 0 to 15, high nibbles 16 to 31; w = q - 8.
void UnpackQ4_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  uint8_t* codes = out->codes;
  for (int b = 0; b < num_blocks; ++b, blocks += 18, codes += kBlock) {
    out->d[b] = LoadScale(blocks);
    for (int i = 0; i < 16; ++i) {
      codes[i] = blocks[2 + i] & 0x0f;
      codes[16 + i] = blocks[2 + i] >> 4;
    }
  }
}

// Q4_1: f16 d, f16 m; nibbles as Q4_0; w = q.
void UnpackQ4_1(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  uint8_t* codes = out->codes;
  for (int b = 0; b < num_blocks; ++b, blocks += 20, codes += kBlock) {
    out->d[b] = LoadScale(blocks);
    out->m[b] = LoadScale(blocks + 2);
    for (int i = 0; i < 16; ++i) {
      codes[i] = blocks[4 + i] & 0x0f;
      codes[16 + i] = blocks[4 + i] >> 4;
    }
  }
}

// Nibbles as Q4_0; bit i of `high` is bit 4 of value i.
void FiveBitCodes(const uint8_t* nibbles, uint32_t high, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<uint8_t>((nibbles[i] & 0x0f) | ((high >> i) & 1) << 4);
    codes[16 + i] = static_cast<uint8_t>((nibbles[i] >> 4) | ((high >> (16 + i)) & 1) << 4);
  }
}

// Q5_0: f16 d; u32 high bits; nibbles; w = q - 16.
void UnpackQ5_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 22) {
    out->d[b] = LoadScale(blocks);
    FiveBitCodes(blocks + 6, Load32(blocks + 2), out->codes + b * kBlock);
  }
}

// Q5_1: f16 d, f16 m; u32 high bits; nibbles; w = q.
void UnpackQ5_1(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; ++b, blocks += 24) {
    out->d[b] = LoadScale(blocks);
    out->m[b] = LoadScale(blocks + 2);
    FiveBitCodes(blocks + 8, Load32(blocks + 4), out->codes + b * kBlock);
  }
}

// Q8_0: f16 d; 32 int8; w = q.
void UnpackQ8_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  uint8_t* codes = out->codes;
  for (int b = 0; b < num_blocks; ++b, blocks += 34, codes += kBlock) {
    out->d[b] = LoadScale(blocks);
    for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(blocks[2 + i] ^ 0x80);
  }
}

// IQ4_NL: f16 d; nibbles as Q4_0 into the level table.
void UnpackIQ4_NL(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  uint8_t* codes = out->codes;
  for (int b = 0; b < num_blocks; ++b, blocks += 18, codes += kBlock) {
    out->d[b] = LoadScale(blocks);
    for (int i = 0; i < 16; ++i) {
      codes[i] = kIq4Codes[blocks[2 + i] & 0x0f];
      codes[16 + i] = kIq4Codes[blocks[2 + i] >> 4];
    }
  }
}

// MXFP4: a power of two as an exponent byte; nibbles as Q4_0 into the level table. The levels are
// twice the stored value, so D = 2^(e-128); below e = 2 that is subnormal.
void UnpackMXFP4(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  uint8_t* codes = out->codes;
  for (int b = 0; b < num_blocks; ++b, blocks += 17, codes += kBlock) {
    const uint32_t e = blocks[0];
    out->d[b] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int i = 0; i < 16; ++i) {
      codes[i] = kMxfp4Codes[blocks[1 + i] & 0x0f];
      codes[16 + i] = kMxfp4Codes[blocks[1 + i] >> 4];
    }
  }
}

// Q1_0: f16 d for 128 values; bit i of the 16 bytes is value i, 1 for +1 and 0 for -1.
void UnpackQ1_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; b += 4, blocks += 18) {
    for (int part = 0; part < 4; ++part) out->d[b + part] = LoadScale(blocks);
    for (int byte = 0; byte < 16; ++byte) {
      uint8_t* codes = out->codes + b * kBlock + 8 * byte;
      for (int i = 0; i < 8; ++i) {
        const int bit = (blocks[2 + byte] >> i) & 1;
        codes[i] = static_cast<uint8_t>(kGridBias - 1 + 2 * bit);
      }
    }
  }
}

// Q2_0: f16 d for 64 values; four values a byte, the low bits first; w = q - 1.
void UnpackQ2_0(const uint8_t* blocks, int num_blocks, RowSegment* out) {
  for (int b = 0; b < num_blocks; b += 2, blocks += 18) {
    out->d[b] = out->d[b + 1] = LoadScale(blocks);
    for (int byte = 0; byte < 16; ++byte) {
      uint8_t* codes = out->codes + b * kBlock + 4 * byte;
      for (int i = 0; i < 4; ++i) {
        const int q = (blocks[2 + byte] >> (2 * i)) & 3;
        codes[i] = static_cast<uint8_t>(kGridBias - 1 + q);
      }
    }
  }
}

}  // namespace

UnpackFn ScalarUnpackSmall(GgmlType type) {
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
