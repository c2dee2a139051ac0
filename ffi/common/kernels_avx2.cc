// panel.h's operations for AVX2 with FMA and F16C: two 256-bit vectors hold the panel's 16 rows.

#include <immintrin.h>

#include <cstring>

#include "common/numerics.h"
#include "common/panel.h"

namespace strata {
namespace {

inline void Transpose8(__m256i v[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

void Pack(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
          int num_blocks, const Ahead& ahead, Panel* panel) {
  const UnpackFn unpack = Avx2Unpack(type.type);
  RowSegment segments[kPanelRows];
  for (int r = 0; r < num_rows; ++r) {
    ahead.Ask(r);
    unpack(rows + r * row_bytes, num_blocks, &segments[r]);
  }
  for (int r = num_rows; r < kPanelRows; ++r) std::memset(&segments[r], 0, sizeof(RowSegment));
  for (int b = 0; b < num_blocks; ++b) {
    for (int half = 0; half < 2; ++half) {
      __m256i v[8];
      for (int r = 0; r < 8; ++r) {
        v[r] = _mm256_load_si256(
            reinterpret_cast<const __m256i*>(segments[8 * half + r].codes + b * kBlock));
      }
      Transpose8(v);
      for (int j = 0; j < 8; ++j) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(panel->codes[b][j][8 * half]), v[j]);
      }
    }
  }
  for (int r = 0; r < kPanelRows; ++r) {
    for (int b = 0; b < num_blocks; ++b) {
      panel->d[b][r] = segments[r].d[b];
      panel->m[b][r] = segments[r].m[b];
    }
    for (int g = 0; g < 2 * num_blocks; ++g) {
      panel->k[g][r] = segments[r].k[g];
      panel->n[g][r] = segments[r].n[g];
    }
  }
}

// Up to 8 values of a row that is not quantised, as float bits; zero past `count`.
inline __m256i LoadFloats(const TypeInfo& type, const uint8_t* bytes, int count) {
  alignas(32) uint8_t buffer[32] = {};
  if (count < 8) {
    std::memcpy(buffer, bytes, static_cast<size_t>(count) * type.block_bytes);
    bytes = buffer;
  }
  if (type.type == GgmlType::kF32) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  }
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  if (type.type == GgmlType::kF16) return _mm256_castps_si256(_mm256_cvtph_ps(half));
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
}

void PackFloat(const TypeInfo& type, const uint8_t* rows, int64_t row_bytes, int num_rows,
               int num_values, const Ahead& ahead, FloatPanel* panel) {
  for (int c = 0; c < num_values; c += 8) {
    if (c % 16 == 0) ahead.Ask(c / 16);
    const int count = num_values - c < 8 ? num_values - c : 8;
    for (int half = 0; half < 2; ++half) {
      __m256i v[8];
      for (int i = 0; i < 8; ++i) {
        const int r = 8 * half + i;
        v[i] = r < num_rows ? LoadFloats(type, rows + r * row_bytes + c * type.block_bytes, count)
                            : _mm256_setzero_si256();
      }
      Transpose8(v);
      for (int i = 0; i < 8; ++i) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(panel->w[c + i] + 8 * half), v[i]);
      }
    }
  }
}

inline void AddToTotal(const PanelOutput& out, int64_t t, int half, __m256 acc) {
  alignas(32) float lanes[8];
  float* y = out.y + t * out.stride + 8 * half;
  const int count = out.num_columns - 8 * half;
  if (count >= 8) {
    const __m256 total = out.first ? _mm256_setzero_ps() : _mm256_loadu_ps(y);
    _mm256_storeu_ps(y, _mm256_add_ps(total, acc));
    return;
  }
  _mm256_store_ps(lanes, acc);
  for (int r = 0; r < count; ++r) y[r] = (out.first ? 0.0f : y[r]) + lanes[r];
}

inline __m256i Dword(const int8_t* q) {
  int32_t value;
  std::memcpy(&value, q, 4);
  return _mm256_set1_epi32(value);
}

// sum += four products per lane, exact. vpmaddubsw adds two products in int16: codes up to 128 fit
// (2 * 128 * 127 < 2^15); wider codes go in as |w| and sign(q, w), which fit for the same reason.
template <bool kWide>
inline __m256i Dot4(__m256i sum, __m256i code, __m256i q) {
  if constexpr (kWide) {
    const __m256i w = _mm256_xor_si256(code, _mm256_set1_epi8(static_cast<char>(0x80)));
    code = _mm256_abs_epi8(w);
    q = _mm256_sign_epi8(q, w);
  }
  const __m256i pairs = _mm256_maddubs_epi16(code, q);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

struct RowView {
  const int8_t* q;
  const float* scales;
  const int32_t* sums;
};

// One block of 32: I as floats for 8 weight rows.
template <Form kForm, bool kWide>
inline __m256 BlockValue(int bias, const Panel& panel, int b, int half, const RowView& row) {
  constexpr bool kHalves = kForm == Form::kSplit || kForm == Form::kSplitMin;
  constexpr int kParts = kHalves ? 2 : 1;
  __m256 value = _mm256_setzero_ps();
  for (int g = 0; g < kParts; ++g) {
    const int32_t codes = kHalves ? row.sums[2 * b + g] : row.sums[2 * b] + row.sums[2 * b + 1];
    __m256i sum = _mm256_set1_epi32(kWide ? 0 : -bias * codes);
    for (int j = g * 8 / kParts; j < (g + 1) * 8 / kParts; ++j) {
      const __m256i w =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.codes[b][j][8 * half]));
      sum = Dot4<kWide>(sum, w, Dword(row.q + b * kBlock + j * 4));
    }
    const __m256 p = _mm256_cvtepi32_ps(sum);
    if constexpr (kHalves) {
      const __m256 k = _mm256_load_ps(panel.k[2 * b + g] + 8 * half);
      value = g == 0 ? _mm256_mul_ps(k, p) : _mm256_fmadd_ps(k, p, value);  // exact: below 2^24
    } else {
      value = p;
    }
  }
  return value;
}

template <Form kForm, bool kWide>
void MultiplyForm(int bias, const Panel& panel, int num_blocks, const Activations& x, int64_t block,
                  int64_t num_rows, const PanelOutput& out) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t index = x.rows ? x.rows[t] : t;
    const RowView row = {x.codes + index * x.width + block * kBlock,
                         x.scales + index * (x.width / kBlock) + block,
                         x.sums + index * (x.width / 16) + 2 * block};
    __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int b = 0; b < num_blocks; ++b) {
      const __m256 dx = _mm256_set1_ps(row.scales[b]);
      for (int half = 0; half < 2; ++half) {
        const __m256 value = BlockValue<kForm, kWide>(bias, panel, b, half, row);
        const __m256 d = _mm256_load_ps(panel.d[b] + 8 * half);
        acc[half] = _mm256_fmadd_ps(value, _mm256_mul_ps(d, dx), acc[half]);
        if constexpr (kForm == Form::kMin || kForm == Form::kSplitMin) {
          const __m256 m = _mm256_mul_ps(_mm256_load_ps(panel.m[b] + 8 * half), dx);
          __m256 j = _mm256_set1_ps(static_cast<float>(row.sums[2 * b] + row.sums[2 * b + 1]));
          if constexpr (kForm == Form::kSplitMin) {
            const __m256 s0 = _mm256_set1_ps(static_cast<float>(row.sums[2 * b]));
            const __m256 s1 = _mm256_set1_ps(static_cast<float>(row.sums[2 * b + 1]));
            j = _mm256_mul_ps(_mm256_load_ps(panel.n[2 * b] + 8 * half), s0);
            j = _mm256_fmadd_ps(_mm256_load_ps(panel.n[2 * b + 1] + 8 * half), s1, j);
          }
          acc[half] = _mm256_fmadd_ps(j, m, acc[half]);
        }
      }
    }
    AddToTotal(out, t, 0, acc[0]);
    AddToTotal(out, t, 1, acc[1]);
  }
}

void Multiply(const TypeInfo& type, const Panel& panel, int num_blocks, const Activations& x,
              int64_t block, int64_t num_rows, const PanelOutput& out) {
  switch (type.form) {
    case Form::kPlain:
      return type.bias == 128
                 ? MultiplyForm<Form::kPlain, true>(0, panel, num_blocks, x, block, num_rows, out)
                 : MultiplyForm<Form::kPlain, false>(type.bias, panel, num_blocks, x, block,
                                                     num_rows, out);
    case Form::kMin:
      return MultiplyForm<Form::kMin, false>(type.bias, panel, num_blocks, x, block, num_rows, out);
    case Form::kSplit:
      return MultiplyForm<Form::kSplit, false>(type.bias, panel, num_blocks, x, block, num_rows,
                                               out);
    case Form::kSplitMin:
      return MultiplyForm<Form::kSplitMin, false>(type.bias, panel, num_blocks, x, block, num_rows,
                                                  out);
    case Form::kFloat:
      return;  // MultiplyFloat's
  }
}

void MultiplyFloat(const FloatPanel& panel, int num_values, const Activations& x,
                   int64_t first_value, int64_t num_rows, const PanelOutput& out) {
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* v = x.values + (x.rows ? x.rows[t] : t) * x.width + first_value;
    __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int begin = 0; begin < num_values; begin += kBlock) {
      const int end = begin + kBlock < num_values ? begin + kBlock : num_values;
      __m256 p[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
      for (int k = begin; k < end; ++k) {
        const __m256 value = _mm256_set1_ps(v[k]);
        p[0] = _mm256_fmadd_ps(_mm256_load_ps(panel.w[k]), value, p[0]);
        p[1] = _mm256_fmadd_ps(_mm256_load_ps(panel.w[k] + 8), value, p[1]);
      }
      acc[0] = _mm256_add_ps(acc[0], p[0]);
      acc[1] = _mm256_add_ps(acc[1], p[1]);
    }
    AddToTotal(out, t, 0, acc[0]);
    AddToTotal(out, t, 1, acc[1]);
  }
}

void Quantize(const float* x, int64_t width, int8_t* codes, float* scales, int32_t* sums) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 largest_finite = _mm256_set1_ps(0x1.fffffep127f);
  for (int64_t b = 0; b < width / kBlock; ++b) {
    __m256 v[4];
    __m256 largest = _mm256_setzero_ps();
    int finite = 0xff;
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(x + b * kBlock + 8 * i);
      const __m256 a = _mm256_and_ps(v[i], magnitude);
      finite &= _mm256_movemask_ps(_mm256_cmp_ps(a, largest_finite, _CMP_LE_OQ));
      largest = _mm256_max_ps(largest, a);
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, largest);
    float top = 0.0f;
    for (const float lane : lanes) top = lane > top ? lane : top;
    int8_t* q = codes + b * kBlock;
    sums[2 * b] = sums[2 * b + 1] = 0;
    if (finite != 0xff || top < kQuantFloor) {
      std::memset(q, 0, kBlock);
      scales[b] = finite == 0xff ? 0.0f : std::bit_cast<float>(0x7fc00000u);
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(127.0f / top);
    for (int i = 0; i < 4; ++i) {
      alignas(32) int32_t rounded[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(rounded),
                         _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)));
      for (int k = 0; k < 8; ++k) {
        q[8 * i + k] = static_cast<int8_t>(rounded[k]);
        sums[2 * b + i / 2] += rounded[k];
      }
    }
    scales[b] = top * kInv127;
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t count, float* h) {
  for (int64_t i = 0; i < count; ++i) h[i] = SiluMul(gate[i], up[i]);
}

void Accumulate(float weight, const float* row, int64_t count, float* y) {
  const __m256 w = _mm256_set1_ps(weight);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_fmadd_ps(w, _mm256_loadu_ps(row + i), _mm256_loadu_ps(y + i)));
  }
  for (; i < count; ++i) y[i] = std::fma(weight, row[i], y[i]);
}

}  // namespace

const Kernels& Avx2Kernels() {
  static constexpr Kernels kKernels = {"avx2",   Pack,       PackFloat,  Multiply, MultiplyFloat,
                                       Quantize, SiluMulRow, Accumulate, nullptr};
  return kKernels;
}

}  // namespace strata
