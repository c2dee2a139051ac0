// panel.h's operations for AVX-512 with VNNI: a 512-bit lane is a weight row.

#include <immintrin.h>

#include <cstring>
#include <initializer_list>

#include "common/numerics.h"
#include "common/panel.h"

namespace strata {
namespace {

// Transposes 16 vectors of 16 dwords in four rounds of pairwise interleaving.
inline void Transpose16(__m512i v[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Q8_0 holds the codes as they are needed: they go from the file's bytes to the panel in one step.
void PackQ8_0(const uint8_t* rows, int64_t row_bytes, int num_rows, int num_blocks,
              const Ahead& ahead, Panel* panel) {
  constexpr int kBytes = 34;  // f16 d, 32 codes
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  alignas(64) uint16_t scales[kSegmentBlocks][kPanelRows] = {};
  for (int b = 0; b < num_blocks; b += 2) {
    for (int part = 2 * b; part < 2 * b + 4; ++part) ahead.Ask(part);
    const bool pair = b + 1 < num_blocks;
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      if (r >= num_rows) {
        v[r] = _mm512_setzero_si512();
        continue;
      }
      const uint8_t* block = rows + r * row_bytes + b * kBytes;
      const uint8_t* second = pair ? block + kBytes : block;
      std::memcpy(&scales[b][r], block, 2);
      if (pair) std::memcpy(&scales[b + 1][r], second, 2);
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second + 2));
      v[r] = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), flip);
    }
    Transpose16(v);
    uint8_t* to = panel->codes[b][0][0];
    for (int g = 0; g < (pair ? 16 : 8); ++g) _mm512_store_si512(to + g * 64, v[g]);
  }
  for (int b = 0; b < num_blocks; ++b) {
    const __m256i half = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales[b]));
    _mm512_store_ps(panel->d[b], _mm512_cvtph_ps(half));
  }
}

void Pack(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
          int num_blocks, const Ahead& ahead, Panel* panel) {
  if (type.type == GgmlType::kQ8_0) {
    return PackQ8_0(rows, row_bytes, num_rows, num_blocks, ahead, panel);
  }
  const UnpackFn unpack = Avx512Unpack(type.type);
  RowSegment segments[kPanelRows];
  for (int r = 0; r < num_rows; ++r) {
    ahead.Ask(r);
    unpack(rows + r * row_bytes, num_blocks, &segments[r]);
  }
  for (int r = num_rows; r < kPanelRows; ++r) std::memset(&segments[r], 0, sizeof(RowSegment));
  // 64 bytes of each row are 16 groups of 4 values: two blocks of the panel.
  for (int c = 0; c < num_blocks * kBlock; c += 64) {
    __m512i v[16];
    for (int r = 0; r < 16; ++r) v[r] = _mm512_load_si512(segments[r].codes + c);
    Transpose16(v);
    uint8_t* to = panel->codes[c / kBlock][0][0];
    for (int g = 0; g < 16; ++g) _mm512_store_si512(to + g * 64, v[g]);
  }
  for (int r = 0; r < kPanelRows; ++r) {
    for (int b = 0; b < num_blocks; ++b) panel->d[b][r] = segments[r].d[b];
  }
  if (type.form == Form::kMin || type.form == Form::kSplitMin) {
    for (int r = 0; r < kPanelRows; ++r) {
      for (int b = 0; b < num_blocks; ++b) panel->m[b][r] = segments[r].m[b];
    }
  }
  if (type.form == Form::kSplit || type.form == Form::kSplitMin) {
    for (int r = 0; r < kPanelRows; ++r) {
      for (int g = 0; g < 2 * num_blocks; ++g) panel->k[g][r] = segments[r].k[g];
    }
  }
  if (type.form == Form::kSplitMin) {
    for (int r = 0; r < kPanelRows; ++r) {
      for (int g = 0; g < 2 * num_blocks; ++g) panel->n[g][r] = segments[r].n[g];
    }
  }
}

// 16 values (fewer under the mask) of a row that is not quantised, as float bits.
inline __m512i LoadFloats(GgmlType type, const uint8_t* bytes, __mmask16 mask) {
  if (type == GgmlType::kF32) return _mm512_maskz_loadu_epi32(mask, bytes);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, bytes);
  if (type == GgmlType::kF16) return _mm512_castps_si512(_mm512_cvtph_ps(half));
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

void PackFloat(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
               int num_values, const Ahead& ahead, FloatPanel* panel) {
  for (int c = 0; c < num_values; c += 16) {
    ahead.Ask(c / 16);
    const int count = num_values - c < 16 ? num_values - c : 16;
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    __m512i v[16];
    for (int r = 0; r < 16; ++r) {
      v[r] = r < num_rows ? LoadFloats(type.type, rows + r * row_bytes + c * type.block_bytes, mask)
                          : _mm512_setzero_si512();
    }
    Transpose16(v);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(panel->w[c + i], v[i]);
  }
}

inline void AddToTotal(const PanelOutput& out, int64_t t, __m512 acc) {
  float* y = out.y + t * out.stride;
  const __mmask16 mask = static_cast<__mmask16>((1u << out.num_columns) - 1);
  const __m512 total = out.first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, y);
  _mm512_mask_storeu_ps(y, mask, _mm512_add_ps(total, acc));
}

inline __m512i Dword(const int8_t* q) {
  int32_t value;
  std::memcpy(&value, q, 4);
  return _mm512_set1_epi32(value);
}

// R activation rows share every load of the panel: R chains of dot products hide their latency.
template <Form kForm, int R>
void MultiplyRows(int bias, const Panel& panel, int num_blocks, const Activations& x, int64_t block,
                  int64_t t0, const PanelOutput& out) {
  constexpr bool kHalves = kForm == Form::kSplit || kForm == Form::kSplitMin;
  const int8_t* q[R];
  const float* scales[R];
  const int32_t* sums[R];
  __m512 acc[R];
  for (int i = 0; i < R; ++i) {
    const int64_t row = x.rows ? x.rows[t0 + i] : t0 + i;
    q[i] = x.codes + row * x.width + block * kBlock;
    scales[i] = x.scales + row * (x.width / kBlock) + block;
    sums[i] = x.sums + row * (x.width / 16) + 2 * block;
    acc[i] = _mm512_setzero_ps();
  }
  for (int b = 0; b < num_blocks; ++b) {
    const __m512 d = _mm512_load_ps(panel.d[b]);
    __m512 value[R];
    if constexpr (kHalves) {
      for (int g = 0; g < 2; ++g) {
        __m512i part[R];
        for (int i = 0; i < R; ++i) part[i] = _mm512_set1_epi32(-bias * sums[i][2 * b + g]);
        for (int j = 4 * g; j < 4 * g + 4; ++j) {
          const __m512i w = _mm512_load_si512(panel.codes[b][j]);
          for (int i = 0; i < R; ++i) {
            part[i] = _mm512_dpbusd_epi32(part[i], w, Dword(q[i] + b * kBlock + j * 4));
          }
        }
        // Factor times sum and the sum of both halves stay below 2^24: exact in float32.
        const __m512 k = _mm512_load_ps(panel.k[2 * b + g]);
        for (int i = 0; i < R; ++i) {
          const __m512 p = _mm512_cvtepi32_ps(part[i]);
          value[i] = g == 0 ? _mm512_mul_ps(k, p) : _mm512_fmadd_ps(k, p, value[i]);
        }
      }
    } else {
      __m512i sum[R];
      for (int i = 0; i < R; ++i) {
        sum[i] = _mm512_set1_epi32(-bias * (sums[i][2 * b] + sums[i][2 * b + 1]));
      }
      if constexpr (R == 1) {
        // Eight steps in one chain would wait for each other; integers may be summed in any order.
        __m512i part[4] = {sum[0], _mm512_setzero_si512(), _mm512_setzero_si512(),
                           _mm512_setzero_si512()};
        for (int j = 0; j < kBlock / 4; ++j) {
          const __m512i w = _mm512_load_si512(panel.codes[b][j]);
          part[j % 4] = _mm512_dpbusd_epi32(part[j % 4], w, Dword(q[0] + b * kBlock + j * 4));
        }
        sum[0] = _mm512_add_epi32(_mm512_add_epi32(part[0], part[1]),
                                  _mm512_add_epi32(part[2], part[3]));
      } else {
        for (int j = 0; j < kBlock / 4; ++j) {
          const __m512i w = _mm512_load_si512(panel.codes[b][j]);
          for (int i = 0; i < R; ++i) {
            sum[i] = _mm512_dpbusd_epi32(sum[i], w, Dword(q[i] + b * kBlock + j * 4));
          }
        }
      }
      for (int i = 0; i < R; ++i) value[i] = _mm512_cvtepi32_ps(sum[i]);
    }
    for (int i = 0; i < R; ++i) {
      const __m512 dx = _mm512_set1_ps(scales[i][b]);
      acc[i] = _mm512_fmadd_ps(value[i], _mm512_mul_ps(d, dx), acc[i]);
      if constexpr (kForm == Form::kMin) {
        const float j = static_cast<float>(sums[i][2 * b] + sums[i][2 * b + 1]);
        const __m512 m = _mm512_mul_ps(_mm512_load_ps(panel.m[b]), dx);
        acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(j), m, acc[i]);
      }
      if constexpr (kForm == Form::kSplitMin) {
        const __m512 s0 = _mm512_set1_ps(static_cast<float>(sums[i][2 * b]));
        const __m512 s1 = _mm512_set1_ps(static_cast<float>(sums[i][2 * b + 1]));
        __m512 j = _mm512_mul_ps(_mm512_load_ps(panel.n[2 * b]), s0);
        j = _mm512_fmadd_ps(_mm512_load_ps(panel.n[2 * b + 1]), s1, j);
        const __m512 m = _mm512_mul_ps(_mm512_load_ps(panel.m[b]), dx);
        acc[i] = _mm512_fmadd_ps(j, m, acc[i]);
      }
    }
  }
  for (int i = 0; i < R; ++i) AddToTotal(out, t0 + i, acc[i]);
}

template <Form kForm>
void MultiplyForm(int bias, const Panel& panel, int num_blocks, const Activations& x, int64_t block,
                  int64_t num_rows, const PanelOutput& out) {
  int64_t t = 0;
  for (; t + 8 <= num_rows; t += 8) {
    MultiplyRows<kForm, 8>(bias, panel, num_blocks, x, block, t, out);
  }
  if (num_rows - t >= 4) {
    MultiplyRows<kForm, 4>(bias, panel, num_blocks, x, block, t, out);
    t += 4;
  }
  if (num_rows - t >= 2) {
    MultiplyRows<kForm, 2>(bias, panel, num_blocks, x, block, t, out);
    t += 2;
  }
  if (t < num_rows) MultiplyRows<kForm, 1>(bias, panel, num_blocks, x, block, t, out);
}

void Multiply(const TypeInfo& type, const Panel& panel, int num_blocks, const Activations& x,
              int64_t block, int64_t num_rows, const PanelOutput& out) {
  switch (type.form) {
    case Form::kPlain:
      return MultiplyForm<Form::kPlain>(type.bias, panel, num_blocks, x, block, num_rows, out);
    case Form::kMin:
      return MultiplyForm<Form::kMin>(type.bias, panel, num_blocks, x, block, num_rows, out);
    case Form::kSplit:
      return MultiplyForm<Form::kSplit>(type.bias, panel, num_blocks, x, block, num_rows, out);
    case Form::kSplitMin:
      return MultiplyForm<Form::kSplitMin>(type.bias, panel, num_blocks, x, block, num_rows, out);
    case Form::kFloat:
      return;  // MultiplyFloat's
  }
}

// Sums of neighbouring lanes of two vectors, side by side.
inline __m512i AddNeighbours32(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

inline __m512i AddNeighbours64(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// 64 values of 16 weight rows: from each pair of rows' dot products, four values to a lane, to the
// sums of both blocks of 32, a row to a lane. Integers, so in any order.
inline void SumBlocks(const __m512i pairs[8], __m512i sums[2]) {
  __m512i quads[4];
  for (int i = 0; i < 4; ++i) quads[i] = AddNeighbours64(pairs[2 * i], pairs[2 * i + 1]);
  __m512i half[2];
  for (int i = 0; i < 2; ++i) {
    half[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                               _mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0xdd));
  }
  sums[0] = _mm512_shuffle_i32x4(half[0], half[1], 0x88);
  sums[1] = _mm512_shuffle_i32x4(half[0], half[1], 0xdd);
}

// D of 16 rows: a vector for each block, a row to a lane.
inline void TransposeScales(const RowSegment (&rows)[kPanelRows], __m512 scales[8]) {
  __m512 v[8], t[8];
  for (int i = 0; i < 8; ++i) {
    const int row = i / 4 * 8 + i % 4;  // and the one four rows on
    const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(rows[row].d));
    v[i] = _mm512_insertf32x8(low, _mm256_loadu_ps(rows[row + 4].d), 1);
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  const auto join = [&](int i, __m512 a, __m512 b) {
    scales[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    scales[i + 4] = _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  join(0, low(t[0], t[2]), low(t[4], t[6]));
  join(1, high(t[0], t[2]), high(t[4], t[6]));
  join(2, low(t[1], t[3]), low(t[5], t[7]));
  join(3, high(t[1], t[3]), high(t[5], t[7]));
}

// With one activation row a panel is written to be read once. Here a weight row is multiplied as it
// is unpacked, and the additions that a dot product needs anyway bring the rows side by side.
// kParts: of 64 values.
template <int kParts>
void MultiplyParts(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
                   int num_blocks, const Ahead& ahead, const Activations& x, int64_t block,
                   const PanelOutput& out) {
  const UnpackFn unpack = Avx512Unpack(type.type);
  const int64_t row = x.rows ? x.rows[0] : 0;
  const int8_t* q = x.codes + row * x.width + block * kBlock;
  const float* scales = x.scales + row * (x.width / kBlock) + block;
  const int32_t* code_sums = x.sums + row * (x.width / 16) + 2 * block;
  __m512i codes[kParts];
  for (int j = 0; j < kParts; ++j) {
    const __mmask64 mask = 2 * j + 1 < num_blocks ? ~__mmask64{0} : __mmask64{0xffffffffu};
    codes[j] = _mm512_maskz_loadu_epi8(mask, q + 64 * j);
  }
  RowSegment segments[kPanelRows];
  for (int r = 0; r < num_rows; ++r) {
    ahead.Ask(r);
    unpack(rows + r * row_bytes, num_blocks, &segments[r]);
  }
  for (int r = num_rows; r < kPanelRows; ++r) std::memset(&segments[r], 0, sizeof(RowSegment));
  const auto dot = [&](int r, int j) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(),
                               _mm512_load_si512(segments[r].codes + 64 * j), codes[j]);
  };
  __m512 row_scales[kSegmentBlocks];
  TransposeScales(segments, row_scales);
  __m512 acc = _mm512_setzero_ps();
  for (int j = 0; j < kParts; ++j) {
    __m512i pairs[8], sums[2];
    for (int p = 0; p < 8; ++p) pairs[p] = AddNeighbours32(dot(2 * p, j), dot(2 * p + 1, j));
    SumBlocks(pairs, sums);
    for (int b = 2 * j; b < 2 * j + 2 && b < num_blocks; ++b) {
      const int less = type.bias * (code_sums[2 * b] + code_sums[2 * b + 1]);
      const __m512i sum = _mm512_sub_epi32(sums[b % 2], _mm512_set1_epi32(less));
      const __m512 scale = _mm512_mul_ps(row_scales[b], _mm512_set1_ps(scales[b]));
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc);
    }
  }
  AddToTotal(out, 0, acc);
}

void MultiplyOne(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
                 int num_blocks, const Ahead& ahead, const Activations& x, int64_t block,
                 const PanelOutput& out) {
  const auto run = [&](auto multiply) {
    multiply(type, rows, row_bytes, num_rows, num_blocks, ahead, x, block, out);
  };
  switch ((num_blocks + 1) / 2) {
    case 1:
      return run(MultiplyParts<1>);
    case 2:
      return run(MultiplyParts<2>);
    case 3:
      return run(MultiplyParts<3>);
    default:
      return run(MultiplyParts<4>);
  }
}

template <int R>
void MultiplyFloatRows(const FloatPanel& panel, int num_values, const Activations& x,
                       int64_t first_value, int64_t t0, const PanelOutput& out) {
  const float* v[R];
  __m512 acc[R];
  for (int i = 0; i < R; ++i) {
    v[i] = x.values + (x.rows ? x.rows[t0 + i] : t0 + i) * x.width + first_value;
    acc[i] = _mm512_setzero_ps();
  }
  for (int begin = 0; begin < num_values; begin += kBlock) {
    const int end = begin + kBlock < num_values ? begin + kBlock : num_values;
    __m512 p[R];
    for (int i = 0; i < R; ++i) p[i] = _mm512_setzero_ps();
    for (int k = begin; k < end; ++k) {
      const __m512 w = _mm512_load_ps(panel.w[k]);
      for (int i = 0; i < R; ++i) p[i] = _mm512_fmadd_ps(w, _mm512_set1_ps(v[i][k]), p[i]);
    }
    for (int i = 0; i < R; ++i) acc[i] = _mm512_add_ps(acc[i], p[i]);
  }
  for (int i = 0; i < R; ++i) AddToTotal(out, t0 + i, acc[i]);
}

void MultiplyFloat(const FloatPanel& panel, int num_values, const Activations& x,
                   int64_t first_value, int64_t num_rows, const PanelOutput& out) {
  int64_t t = 0;
  for (; t + 8 <= num_rows; t += 8) {
    MultiplyFloatRows<8>(panel, num_values, x, first_value, t, out);
  }
  for (; t + 2 <= num_rows; t += 2) {
    MultiplyFloatRows<2>(panel, num_values, x, first_value, t, out);
  }
  if (t < num_rows) MultiplyFloatRows<1>(panel, num_values, x, first_value, t, out);
}

void Quantize(const float* x, int64_t width, int8_t* codes, float* scales, int32_t* sums) {
  const __m512 largest_finite = _mm512_set1_ps(0x1.fffffep127f);
  const __m128i ones = _mm_set1_epi8(1);
  for (int64_t b = 0; b < width / kBlock; ++b) {
    const __m512 lo = _mm512_loadu_ps(x + b * kBlock);
    const __m512 hi = _mm512_loadu_ps(x + b * kBlock + 16);
    const __m512 a = _mm512_abs_ps(lo);
    const __m512 c = _mm512_abs_ps(hi);
    // Ordered comparison: false for NaN, so a block with any NaN or infinity is told by its mask.
    const __mmask16 finite = _mm512_cmp_ps_mask(a, largest_finite, _CMP_LE_OQ) &
                             _mm512_cmp_ps_mask(c, largest_finite, _CMP_LE_OQ);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(a, c));
    if (finite != 0xffff || largest < kQuantFloor) {
      std::memset(codes + b * kBlock, 0, kBlock);
      scales[b] = finite == 0xffff ? 0.0f : std::bit_cast<float>(0x7fc00000u);
      sums[2 * b] = sums[2 * b + 1] = 0;
      continue;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / largest);
    const __m128i q0 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(lo, inverse)));
    const __m128i q1 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(hi, inverse)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + b * kBlock), q0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + b * kBlock + 16), q1);
    scales[b] = largest * kInv127;
    const __m128i zero = _mm_setzero_si128();
    for (int g = 0; g < 2; ++g) {
      __m128i s = _mm_dpbusd_epi32(zero, ones, g == 0 ? q0 : q1);
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
      s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
      sums[2 * b + g] = _mm_cvtsi128_si32(s);
    }
  }
}

// SiluMul of numerics.h, operation by operation.
void SiluMulRow(const float* gate, const float* up, int64_t count, float* h) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask =
        count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
    const __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
    const __mmask16 nan = _mm512_cmp_ps_mask(g, g, _CMP_UNORD_Q);
    const __m512 sign = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0x80000000u)));
    __m512 c = _mm512_xor_ps(g, sign);
    c = _mm512_max_ps(c, _mm512_set1_ps(-87.0f));
    c = _mm512_min_ps(c, _mm512_set1_ps(87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(kLog2e)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Hi), c);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(kLn2Lo), r);
    __m512 e = _mm512_set1_ps(kExp6);
    for (const float coefficient : {kExp5, kExp4, kExp3, kExp2, 1.0f, 1.0f}) {
      e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(coefficient));
    }
    const __m512i power =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    e = _mm512_mul_ps(e, _mm512_castsi512_ps(power));
    const __m512 s = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    const __m512 result = _mm512_mask_mov_ps(_mm512_mul_ps(s, u), nan, g);
    _mm512_mask_storeu_ps(h + i, mask, result);
  }
}

void Accumulate(float weight, const float* row, int64_t count, float* y) {
  const __m512 w = _mm512_set1_ps(weight);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(y + i, _mm512_fmadd_ps(w, _mm512_loadu_ps(row + i), _mm512_loadu_ps(y + i)));
  }
  for (; i < count; ++i) y[i] = std::fma(weight, row[i], y[i]);
}

}  // namespace

const Kernels& Avx512Kernels() {
  static constexpr Kernels kKernels = {"avx512", Pack,       PackFloat,  Multiply,   MultiplyFloat,
                                       Quantize, SiluMulRow, Accumulate, MultiplyOne};
  return kKernels;
}

}  // namespace strata
