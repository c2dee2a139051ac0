// Tables from which codes are looked up: the code books of gguf_grids.h spread to one byte a value,
// and the fixed levels of the 4-bit types. Everything is computed by the compiler.
#pragma once

#include <cstdint>

#include "common/gguf_grids.h"

namespace strata {

// Bias of every type whose codes are looked up; levels of 4 bits with a wider range have their own.
inline constexpr int kGridBias = 64;

template <typename Word, int kCount>
struct GridWords {
  Word entries[kCount];  // value i of a vector is byte i, counted from the low end
};

// Byte i of an entry is levels[level number i] * factor + offset.
template <typename Word, int kCount, int kLevels>
constexpr GridWords<Word, kCount> SpreadGrid(const uint16_t (&packed)[kCount],
                                             const int8_t (&levels)[kLevels], int factor,
                                             int offset) {
  constexpr int kLength = sizeof(Word);
  constexpr int kWidth = 16 / kLength;
  GridWords<Word, kCount> grid{};
  for (int entry = 0; entry < kCount; ++entry) {
    for (int i = 0; i < kLength; ++i) {
      const int level = levels[(packed[entry] >> (i * kWidth)) & ((1 << kWidth) - 1)];
      grid.entries[entry] |= static_cast<Word>(level * factor + offset) << (8 * i);
    }
  }
  return grid;
}

// IQ2 and IQ3: magnitudes; the sign is stored apart.
inline constexpr auto kIq2XxsGrid = SpreadGrid<uint64_t>(kIq2XxsPacked, kIq2XxsLevels, 1, 0);
inline constexpr auto kIq2XsGrid = SpreadGrid<uint64_t>(kIq2XsPacked, kIq2XsLevels, 1, 0);
inline constexpr auto kIq2SGrid = SpreadGrid<uint64_t>(kIq2SPacked, kIq2SLevels, 1, 0);
inline constexpr auto kIq3XxsGrid = SpreadGrid<uint32_t>(kIq3XxsPacked, kIq3XxsLevels, 1, 0);
inline constexpr auto kIq3SGrid = SpreadGrid<uint32_t>(kIq3SPacked, kIq3SLevels, 1, 0);

// IQ1: 8 * value + bias; +1 or -1 is added to all values of a vector.
inline constexpr auto kIq1Grid = SpreadGrid<uint64_t>(kIq1SPacked, kIq1SLevels, 8, kGridBias);

// IQ4_NL and IQ4_XS: level + 128.
inline constexpr uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};

// MXFP4: twice the E2M1 value, + 64. Codes 8 to 15 are the negatives; 8 is -0.
inline constexpr uint8_t kMxfp4Codes[16] = {64, 65, 66, 67, 68, 70, 72, 76,
                                            64, 63, 62, 61, 60, 58, 56, 52};

}  // namespace strata
