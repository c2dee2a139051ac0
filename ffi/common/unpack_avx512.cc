// IQ3_S and IQ3_XXS with their code books in vector registers, for CPUs with byte permutes (AVX-512
// VBMI). Layouts are described in unpack_scalar_grids.cc.
//
// A code book entry is 16 bits: four level numbers. The low and the high bytes of all entries make
// two tables of bytes, and one permute looks 64 indices up in 128 entries of a table. So a segment
// takes 8 permutes (IQ3_S) instead of 64 loads and as many inserts. The IQ2 types, with half as
// many look-ups a segment, gain too little to be here.

// GCC 12 takes its own _mm512_undefined_epi32 for an uninitialised variable (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "common/code_tables.h"
#include "common/unpack_avx2.h"

// The build enables what its other AVX-512 files need; this one needs more, and checks for it.
#pragma GCC target("avx512vbmi")

namespace strata {
namespace {

template <int kCount>
struct BytePlanes {
  alignas(64) uint8_t low[kCount];
  alignas(64) uint8_t high[kCount];
};

template <int kCount>
constexpr BytePlanes<kCount> SplitBytes(const uint16_t (&packed)[kCount]) {
  BytePlanes<kCount> planes{};
  for (int i = 0; i < kCount; ++i) {
    planes.low[i] = static_cast<uint8_t>(packed[i] & 0xff);
    planes.high[i] = static_cast<uint8_t>(packed[i] >> 8);
  }
  return planes;
}

constexpr auto kXxsPlanes = SplitBytes(kIq3XxsPacked);
constexpr auto kSPlanes = SplitBytes(kIq3SPacked);

// Level + bias by level number, once for each 16 bytes of a shuffle.
struct LevelCodes {
  alignas(64) uint8_t codes[64];
};

constexpr LevelCodes BiasedLevels(const int8_t (&levels)[8]) {
  LevelCodes table{};
  for (int i = 0; i < 64; ++i) {
    table.codes[i] = static_cast<uint8_t>(levels[i % 8] + kGridBias);
  }
  return table;
}

constexpr LevelCodes kXxsLevels = BiasedLevels(kIq3XxsLevels);
constexpr LevelCodes kSLevels = BiasedLevels(kIq3SLevels);

// For each quarter of a segment, which byte of (low bytes, high bytes) goes where: 8 bytes that
// will hold 8 values begin with their two entries, low byte first.
struct Places {
  alignas(64) uint8_t bytes[4][64];
};

constexpr Places MakePlaces() {
  Places places{};
  for (int index = 0; index < kSegment / 4; ++index) {
    uint8_t* to = places.bytes[index / 16] + 8 * (index % 16 / 2) + 2 * (index % 2);
    to[0] = static_cast<uint8_t>(index);
    to[1] = static_cast<uint8_t>(64 + index);
  }
  return places;
}

constexpr Places kPlaces = MakePlaces();

// Bytes of a plane at 64 indices: 8 bits in `index`, the ninth in `bit8`.
template <int kCount>
__m512i LookUp(const uint8_t (&plane)[kCount], __m512i index, __mmask64 bit8) {
  const auto among = [&](int first) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(plane + first), index,
                                    _mm512_load_si512(plane + first + 64));
  };
  const __mmask64 bit7 = _mm512_movepi8_mask(index);
  const __m512i first = _mm512_mask_mov_epi8(among(0), bit7, among(128));
  if constexpr (kCount == 256) return first;
  return _mm512_mask_mov_epi8(first, bit8, _mm512_mask_mov_epi8(among(256), bit7, among(384)));
}

// Looked-up bytes and 256 sign bits to codes.
void StoreGridCodes(__m512i low, __m512i high, const LevelCodes& levels, const uint8_t* signs,
                    uint8_t* codes) {
  // Byte i of 8 takes the 8 bits from bit 4 i on: level number i, and a neighbour to be cleared.
  const __m512i fields = _mm512_set1_epi64(0x1c1814100c080400);
  const __m512i number = _mm512_set1_epi8(0x0f);
  const __m512i table = _mm512_load_si512(levels.codes);
  const __m512i twice_bias = _mm512_set1_epi8(static_cast<char>(2 * kGridBias));
  for (int quarter = 0; quarter < 4; ++quarter) {
    const __m512i places = _mm512_load_si512(kPlaces.bytes[quarter]);
    const __m512i entries = _mm512_permutex2var_epi8(low, places, high);
    const __m512i numbers = _mm512_and_si512(_mm512_multishift_epi64_epi8(fields, entries), number);
    const __m512i positive = _mm512_shuffle_epi8(table, numbers);
    // bias - magnitude = 2 * bias - (bias + magnitude)
    const __mmask64 negative = LoadWord<uint64_t>(signs + 8 * quarter);
    _mm512_store_si512(codes + 64 * quarter,
                       _mm512_mask_sub_epi8(positive, negative, twice_bias, positive));
  }
}

void UnpackIQ3_XXS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const __m256i words = Load32Bytes(block + 66);
  StoreScaled(OddScales(_mm256_srli_epi32(words, 28)), LoadHalf(block) * 0.25f, out->d);
  alignas(32) uint8_t signs[kSegment / 8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), SignsOfWords(words));
  const __m512i index = _mm512_loadu_si512(block + 2);
  StoreGridCodes(LookUp(kXxsPlanes.low, index, 0), LookUp(kXxsPlanes.high, index, 0), kXxsLevels,
                 signs, out->codes);
}

void UnpackIQ3_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreScaled(OddScales(EightNibbles(block + 106)), LoadHalf(block), out->d);
  const __m512i index = _mm512_loadu_si512(block + 2);
  const __mmask64 bit8 = LoadWord<uint64_t>(block + 66);
  StoreGridCodes(LookUp(kSPlanes.low, index, bit8), LookUp(kSPlanes.high, index, bit8), kSLevels,
                 block + 74, out->codes);
}

}  // namespace

UnpackFn Avx512Unpack(GgmlType type) {
  if (!__builtin_cpu_supports("avx512vbmi")) return Avx2Unpack(type);
  switch (type) {
    case GgmlType::kIQ3_XXS:
      return UnpackIQ3_XXS;
    case GgmlType::kIQ3_S:
      return UnpackIQ3_S;
    default:
      return Avx2Unpack(type);
  }
}

}  // namespace strata
