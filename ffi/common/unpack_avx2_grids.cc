// IQ types with a code book; layouts are described in unpack_scalar_grids.cc.
//
// Code book entries are fetched by ordinary loads: gathers are slower on the CPUs measured. What
// can be done for a whole segment at once (signs, scales) is done first.
#include "common/code_tables.h"
#include "common/unpack_avx2.h"

namespace strata {
namespace {

// The bias plus or minus each magnitude; minus where the bit of `signs` is set.
__m256i SignedCodes(__m256i magnitudes, uint32_t signs) {
  const __m256i mask = MaskFromBits(signs);
  const __m256i values = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, mask), mask);
  return _mm256_add_epi8(values, _mm256_set1_epi8(kGridBias));
}

template <int kCount>
__m256i FourVectors(const GridWords<uint64_t, kCount>& grid, unsigned a, unsigned b, unsigned c,
                    unsigned d) {
  const auto entry = [&](unsigned index) { return static_cast<int64_t>(grid.entries[index]); };
  return _mm256_setr_epi64x(entry(a), entry(b), entry(c), entry(d));
}

void UnpackIQ2_XXS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  // Odd words of the 16: signs and scales.
  const __m256 front = _mm256_castsi256_ps(Load32Bytes(block + 2));
  const __m256 back = _mm256_castsi256_ps(Load32Bytes(block + 34));
  const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(front, back, 0xdd));
  const __m256i words = _mm256_permute4x64_epi64(odd, 0xd8);
  StoreScaled(OddScales(_mm256_srli_epi32(words, 28)), LoadHalf(block) * 0.125f, out->d);
  alignas(32) uint32_t signs[kSegmentBlocks];
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), SignsOfWords(words));
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* index = block + 2 + 8 * b;
    const __m256i magnitudes = FourVectors(kIq2XxsGrid, index[0], index[1], index[2], index[3]);
    StoreCodes(SignedCodes(magnitudes, signs[b]), out->codes + b * kBlock);
  }
}

void UnpackIQ2_XS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreSplitScales(LoadHalf(block), block + 66, out);
  const __m256i front = _mm256_srli_epi16(Load32Bytes(block + 2), 9);
  const __m256i back = _mm256_srli_epi16(Load32Bytes(block + 34), 9);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(front, back), 0xd8);
  alignas(32) uint32_t signs[kSegmentBlocks];
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), EvenSigns(bytes));
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint64_t words = LoadWord<uint64_t>(block + 2 + 8 * b);
    const auto index = [&](int v) { return static_cast<unsigned>(words >> (16 * v)) & 511; };
    const __m256i magnitudes = FourVectors(kIq2XsGrid, index(0), index(1), index(2), index(3));
    StoreCodes(SignedCodes(magnitudes, signs[b]), out->codes + b * kBlock);
  }
}

void UnpackIQ2_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreSplitScales(LoadHalf(block), block + 74, out);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* low = block + 2 + 4 * b;
    const unsigned high = block[66 + b];
    const __m256i magnitudes =
        FourVectors(kIq2SGrid, low[0] | (high << 8 & 0x300), low[1] | (high << 6 & 0x300),
                    low[2] | (high << 4 & 0x300), low[3] | (high << 2 & 0x300));
    const uint32_t signs = LoadWord<uint32_t>(block + 34 + 4 * b);
    StoreCodes(SignedCodes(magnitudes, signs), out->codes + b * kBlock);
  }
}

template <int kCount, typename Index>
__m256i EightVectors(const GridWords<uint32_t, kCount>& grid, const Index* indices) {
  const auto entry = [&](int v) { return static_cast<int>(grid.entries[indices[v]]); };
  return _mm256_setr_epi32(entry(0), entry(1), entry(2), entry(3), entry(4), entry(5), entry(6),
                           entry(7));
}

void UnpackIQ3_XXS(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const __m256i words = Load32Bytes(block + 66);
  StoreScaled(OddScales(_mm256_srli_epi32(words, 28)), LoadHalf(block) * 0.25f, out->d);
  alignas(32) uint32_t signs[kSegmentBlocks];
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), SignsOfWords(words));
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const __m256i magnitudes = EightVectors(kIq3XxsGrid, block + 2 + 8 * b);
    StoreCodes(SignedCodes(magnitudes, signs[b]), out->codes + b * kBlock);
  }
}

// The 64 indices of IQ3_S, through memory: reading one back costs less than shifting it out of a
// word. Within 4 blocks the order is 0, 2, 1, 3, as interleaving leaves it.
void StoreNineBitIndices(const uint8_t* block, uint16_t* indices) {
  for (int half = 0; half < 2; ++half) {
    const __m256i low = Load32Bytes(block + 2 + 32 * half);
    const __m256i set = MaskFromBits(LoadWord<uint32_t>(block + 66 + 4 * half));
    const __m256i high = _mm256_and_si256(set, _mm256_set1_epi8(1));
    auto* to = reinterpret_cast<__m256i*>(indices + 32 * half);
    _mm256_store_si256(to, _mm256_unpacklo_epi8(low, high));
    _mm256_store_si256(to + 1, _mm256_unpackhi_epi8(low, high));
  }
}

void UnpackIQ3_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  StoreScaled(OddScales(EightNibbles(block + 106)), LoadHalf(block), out->d);
  alignas(32) uint16_t indices[kSegment / 4];
  StoreNineBitIndices(block, indices);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const int place = (b & 4) | (b & 1) << 1 | (b & 2) >> 1;
    const __m256i magnitudes = EightVectors(kIq3SGrid, indices + 8 * place);
    const uint32_t signs = LoadWord<uint32_t>(block + 74 + 4 * b);
    StoreCodes(SignedCodes(magnitudes, signs), out->codes + b * kBlock);
  }
}

void UnpackIQ1_S(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const __m256i words = _mm256_cvtepu16_epi32(Load16Bytes(block + 34));
  const __m256i scales = _mm256_and_si256(_mm256_srli_epi32(words, 12), _mm256_set1_epi32(7));
  StoreScaled(OddScales(scales), LoadHalf(block) * 0.125f, out->d);
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* low = block + 2 + 4 * b;
    const unsigned word = LoadWord<uint16_t>(block + 34 + 2 * b);
    const __m256i eights =
        FourVectors(kIq1Grid, low[0] | (word << 8 & 0x700), low[1] | (word << 5 & 0x700),
                    low[2] | (word << 2 & 0x700), low[3] | (word >> 1 & 0x700));
    const __m256i shift = _mm256_set1_epi8(word & 0x8000 ? -1 : 1);
    StoreCodes(_mm256_add_epi8(eights, shift), out->codes + b * kBlock);
  }
}

void UnpackIQ1_M(const uint8_t* block, int /*num_blocks*/, RowSegment* out) {
  const uint64_t words = LoadWord<uint64_t>(block + 48);
  const uint16_t half = static_cast<uint16_t>((words >> 12 & 0xf) | (words >> 24 & 0xf0) |
                                              (words >> 36 & 0xf00) | (words >> 48 & 0xf000));
  const float d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))) * 0.125f;
  StoreSame(d, out->d);
  const __m256i field_at = _mm256_setr_epi32(0, 3, 6, 9, 16, 19, 22, 25);
  for (int part = 0; part < 2; ++part) {
    const __m256i pair = _mm256_set1_epi32(static_cast<int>(words >> (32 * part)));
    const __m256i scales =
        _mm256_and_si256(_mm256_srlv_epi32(pair, field_at), _mm256_set1_epi32(7));
    _mm256_storeu_ps(out->k + 8 * part, _mm256_cvtepi32_ps(OddScales(scales)));
  }
  for (int b = 0; b < kSegmentBlocks; ++b) {
    const uint8_t* low = block + 4 * b;
    const unsigned high = LoadWord<uint16_t>(block + 32 + 2 * b);
    const __m256i eights =
        FourVectors(kIq1Grid, low[0] | (high << 8 & 0x700), low[1] | (high << 4 & 0x700),
                    low[2] | (high & 0x700), low[3] | (high >> 4 & 0x700));
    // Bit 3 of nibble v, in all 8 bytes of vector v: -1 where it is set, else +1.
    const __m256i bit = _mm256_setr_epi64x(0x0008, 0x0080, 0x0800, 0x8000);
    const __m256i set = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(high), bit), bit);
    const __m256i shift = _mm256_or_si256(set, _mm256_set1_epi8(1));
    StoreCodes(_mm256_add_epi8(eights, shift), out->codes + b * kBlock);
  }
}

}  // namespace

UnpackFn Avx2UnpackGrids(GgmlType type) {
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
