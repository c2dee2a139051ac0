#include "cuda/arrange.h"

#include <cstring>

namespace strata {
namespace {

uint64_t Load(const uint8_t* bytes) {
  uint64_t words;
  std::memcpy(&words, bytes, sizeof words);
  return words;
}

void Store(uint64_t words, uint8_t* bytes) { std::memcpy(bytes, &words, sizeof words); }

// The same 32 bits in both words of a pair: transforms below work on two words at once.
constexpr uint64_t Twice(uint32_t mask) { return uint64_t{mask} << 32 | mask; }

// Exchanges the bits under `mask` with those `shift` places above them: a swap of two digits in the
// index of a bit, of which transposes are made.
constexpr uint64_t SwapBits(uint64_t bits, uint64_t mask, int shift) {
  const uint64_t differ = (bits >> shift ^ bits) & mask;
  return bits ^ differ ^ differ << shift;
}

// Nibble 2c + h of a word to nibble 4h + c, c in 0..3.
constexpr uint64_t SplitNibbles(uint64_t words) {
  const uint64_t once = SwapBits(words, Twice(0x00f000f0u), 4);
  return SwapBits(once, Twice(0x0000ff00u), 8);
}

constexpr uint64_t JoinNibbles(uint64_t words) {
  const uint64_t once = SwapBits(words, Twice(0x0000ff00u), 8);
  return SwapBits(once, Twice(0x00f000f0u), 4);
}

// Two-bit field 4k + j of a word to field 4j + k; its own inverse.
constexpr uint64_t TransposePairs(uint64_t words) {
  const uint64_t once = SwapBits(words, Twice(0x00cc00ccu), 6);
  return SwapBits(once, Twice(0x0000f0f0u), 12);
}

// Bit 4i + j of a word to bit 8j + i, j in 0..3, i in 0..7.
constexpr uint64_t SplitBits(uint64_t words) {
  words = SwapBits(words, Twice(0x22222222u), 1);
  words = SwapBits(words, Twice(0x0a0a0a0au), 3);
  words = SwapBits(words, Twice(0x00cc00ccu), 6);
  return SwapBits(words, Twice(0x0000f0f0u), 12);
}

constexpr uint64_t JoinBits(uint64_t words) {
  words = SwapBits(words, Twice(0x0000f0f0u), 12);
  words = SwapBits(words, Twice(0x00cc00ccu), 6);
  words = SwapBits(words, Twice(0x0a0a0a0au), 3);
  return SwapBits(words, Twice(0x22222222u), 1);
}

// Bit 8b + c of eight bytes to bit 8c + b; its own inverse.
constexpr uint64_t TransposeBytes(uint64_t bits) {
  bits = SwapBits(bits, 0x00aa00aa00aa00aaull, 7);
  bits = SwapBits(bits, 0x0000cccc0000ccccull, 14);
  return SwapBits(bits, 0x00000000f0f0f0f0ull, 28);
}

// A word of four times 7 sign bits and 4 bits of a scale: the scale's bit v becomes bit 7 of signs
// v, and all is split.
constexpr uint64_t SplitSigns(uint64_t word) {
  uint64_t signs = 0;
  for (int v = 0; v < 4; ++v) {
    signs |= (word >> (7 * v) & 127u) << (8 * v) | (word >> (28 + v) & 1u) << (8 * v + 7);
  }
  return SplitBits(signs);
}

constexpr uint64_t JoinSigns(uint64_t word) {
  const uint64_t signs = JoinBits(word);
  uint64_t result = 0;
  for (int v = 0; v < 4; ++v) {
    result |= (signs >> (8 * v) & 127u) << (7 * v) | (signs >> (8 * v + 7) & 1u) << (28 + v);
  }
  return result;
}

constexpr uint64_t kLow = 0xffffffffu;

// IQ3_XXS: both words of a pair.
constexpr uint64_t SplitBothSigns(uint64_t words) {
  return SplitSigns(words & kLow) | SplitSigns(words >> 32) << 32;
}

constexpr uint64_t JoinBothSigns(uint64_t words) {
  return JoinSigns(words & kLow) | JoinSigns(words >> 32) << 32;
}

// IQ2_XXS: a word of indices, then one of signs.
constexpr uint64_t SplitSecondSigns(uint64_t words) {
  return (words & kLow) | SplitSigns(words >> 32) << 32;
}

constexpr uint64_t JoinSecondSigns(uint64_t words) {
  return (words & kLow) | JoinSigns(words >> 32) << 32;
}

// IQ2_XS: four u16 of a 9-bit index and 7 signs to a word of low index bytes and one of signs.
constexpr uint64_t SplitIndices(uint64_t words) {
  uint64_t indices = 0;
  uint64_t signs = 0;
  for (int v = 0; v < 4; ++v) {
    const uint64_t word = words >> (16 * v) & 0xffffu;
    indices |= (word & 255u) << (8 * v);
    signs |= (word >> 9 | (word >> 8 & 1u) << 7) << (8 * v);
  }
  return indices | SplitBits(signs) << 32;
}

constexpr uint64_t JoinIndices(uint64_t words) {
  const uint64_t signs = JoinBits(words >> 32);
  uint64_t result = 0;
  for (int v = 0; v < 4; ++v) {
    const uint64_t byte = signs >> (8 * v) & 255u;
    const uint64_t index = (words >> (8 * v) & 255u) | byte >> 7 << 8;
    result |= (index | (byte & 127u) << 9) << (16 * v);
  }
  return result;
}

// Applies a transform to kCount pairs of words.
template <uint64_t (*kTransform)(uint64_t), int kCount>
void InPairs(uint8_t* bytes) {
  for (int i = 0; i < kCount; ++i) Store(kTransform(Load(bytes + 8 * i)), bytes + 8 * i);
}

// A part of a stored block and where it lies in a segment.
struct Part {
  int stored;
  int arranged;
  int bytes;
};

// Pairs of words in a segment that are transformed.
struct Pairs {
  int first;  // byte
  void (*split)(uint8_t*);
  void (*join)(uint8_t*);
};

struct Arrangement {
  Part parts[5];  // none: the block as it is
  Pairs pairs[2];
};

template <uint64_t (*kSplit)(uint64_t), uint64_t (*kJoin)(uint64_t), int kCount>
constexpr Pairs PairsAt(int first) {
  return {first, InPairs<kSplit, kCount>, InPairs<kJoin, kCount>};
}

constexpr Arrangement kIq4Nl = {{}, {PairsAt<SplitNibbles, JoinNibbles, 2>(2)}};
constexpr Arrangement kIq4Xs = {{}, {PairsAt<SplitNibbles, JoinNibbles, 16>(8)}};
constexpr Arrangement kMxfp4 = {{}, {PairsAt<SplitNibbles, JoinNibbles, 2>(1)}};
constexpr Arrangement kQ2_0 = {{}, {PairsAt<TransposePairs, TransposePairs, 2>(2)}};
constexpr Arrangement kQ1_0 = {{}, {PairsAt<SplitBits, JoinBits, 2>(2)}};
constexpr Arrangement kIq3S = {
    {{2, 0, 64}, {74, 64, 32}, {66, 96, 8}, {106, 104, 4}, {0, 108, 2}},
    {PairsAt<SplitBits, JoinBits, 4>(64), PairsAt<TransposeBytes, TransposeBytes, 1>(96)}};
constexpr Arrangement kIq3Xxs = {{{2, 0, 96}, {0, 96, 2}},
                                 {PairsAt<SplitBothSigns, JoinBothSigns, 4>(64)}};
constexpr Arrangement kIq2S = {{{2, 0, 72}, {74, 72, 8}, {0, 80, 2}},
                               {PairsAt<SplitBits, JoinBits, 4>(32)}};
constexpr Arrangement kIq2Xs = {{{2, 0, 72}, {0, 72, 2}},
                                {PairsAt<SplitIndices, JoinIndices, 8>(0)}};
constexpr Arrangement kIq2Xxs = {{{2, 0, 64}, {0, 64, 2}},
                                 {PairsAt<SplitSecondSigns, JoinSecondSigns, 8>(0)}};

// Null for types that stay as they are.
const Arrangement* FindArrangement(GgmlType type) {
  switch (type) {
    case GgmlType::kIQ4_NL:
      return &kIq4Nl;
    case GgmlType::kIQ4_XS:
      return &kIq4Xs;
    case GgmlType::kMXFP4:
      return &kMxfp4;
    case GgmlType::kQ2_0:
      return &kQ2_0;
    case GgmlType::kQ1_0:
      return &kQ1_0;
    case GgmlType::kIQ3_S:
      return &kIq3S;
    case GgmlType::kIQ3_XXS:
      return &kIq3Xxs;
    case GgmlType::kIQ2_S:
      return &kIq2S;
    case GgmlType::kIQ2_XS:
      return &kIq2Xs;
    case GgmlType::kIQ2_XXS:
      return &kIq2Xxs;
    default:
      return nullptr;
  }
}

}  // namespace

void ArrangeSegment(GgmlType type, int block_bytes, const uint8_t* stored, int num_bytes,
                    uint8_t* segment) {
  const Arrangement* arrangement = FindArrangement(type);
  if (arrangement == nullptr || arrangement->parts[0].bytes == 0) {
    std::memcpy(segment, stored, static_cast<size_t>(num_bytes));
    if (arrangement == nullptr) return;
  }
  for (int block = 0; block < num_bytes; block += block_bytes) {
    for (const Part& part : arrangement->parts) {
      if (part.bytes == 0) break;
      std::memcpy(segment + block + part.arranged, stored + block + part.stored,
                  static_cast<size_t>(part.bytes));
    }
    for (const Pairs& pairs : arrangement->pairs) {
      if (pairs.split != nullptr) pairs.split(segment + block + pairs.first);
    }
  }
}

void RestoreSegment(GgmlType type, int block_bytes, uint8_t* segment, int num_bytes,
                    uint8_t* stored) {
  const Arrangement* arrangement = FindArrangement(type);
  if (arrangement != nullptr) {
    for (int block = 0; block < num_bytes; block += block_bytes) {
      for (const Pairs& pairs : arrangement->pairs) {
        if (pairs.join != nullptr) pairs.join(segment + block + pairs.first);
      }
      for (const Part& part : arrangement->parts) {
        if (part.bytes == 0) break;
        std::memcpy(stored + block + part.stored, segment + block + part.arranged,
                    static_cast<size_t>(part.bytes));
      }
    }
  }
  if (arrangement == nullptr || arrangement->parts[0].bytes == 0) {
    std::memcpy(stored, segment, static_cast<size_t>(num_bytes));
  }
}

}  // namespace strata
