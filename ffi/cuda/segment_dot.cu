// Compiled with -maxrregcount=128: a kernel needs the registers of every function it may call, and
// without a limit some bodies take 250, so that no block of 16 warps could be launched.
#include "cuda/code_books.cuh"
#include "cuda/segment_dot.cuh"
#include "cuda/segments_body.cuh"

namespace strata {
namespace {

// The code book where it lies in global memory: for single values.
struct GlobalBook {
  const uint32_t* words;
  __device__ __forceinline__ uint32_t Word(uint32_t index) const { return words[index]; }
  __device__ __forceinline__ uint2 Pair(uint32_t index) const {
    return make_uint2(words[2 * index], words[2 * index + 1]);
  }
};

// One body per type, for one activation row and for more.
template <typename Decode, int kRows>
__device__ __noinline__ void Dot(const uint8_t* unit, int lane, int blocks, const Rows& rows,
                                 int first_block, int num_rows, float* acc) {
  SegmentBody<Decode, kRows>(unit, lane, blocks, rows, first_block, kRows == 1 ? 1 : num_rows, acc);
}

template <GgmlType kType, int kRows>
__device__ __noinline__ void DotFloat(const uint8_t* unit, int lane, int blocks, const Rows& rows,
                                      int first_block, int num_rows, float* acc) {
  FloatBody<kType, kRows>(unit, lane, blocks, rows, first_block, kRows == 1 ? 1 : num_rows, acc);
}

// Values 4 `four` on.
template <typename Decode>
__device__ __noinline__ float4 FourValues(const PanelWords& raw, int four) {
  const int b = four / 8;
  uint32_t w[Decode::kSecond != 0 ? 16 : 8];
  Decode::Codes(raw, b, GlobalBook{books::Words(Decode::kType)}, w);
  uint32_t codes = 0, second = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i != four % 8) continue;
    codes = w[i];
    if (Decode::kSecond != 0) second = w[8 + i];
  }
  const BlockScales scales = LoadScales<Decode>(raw, b);
  const int g = four / 4 % 2;
  const auto value_of = [&](int place) {
    int code = static_cast<int8_t>(codes >> (8 * place));
    if (Decode::kSecond != 0) code += Decode::kSecond * static_cast<int8_t>(second >> (8 * place));
    float value = __int2float_rn(Decode::kMultiply * code + Decode::kAdd);
    if (Decode::kForm == Form::kSplit || Decode::kForm == Form::kSplitMin) {
      value = __fmul_rn(__int2float_rn(scales.k[g]), value);
    }
    value = __fmul_rn(scales.d, value);
    if (Decode::kForm == Form::kMin) value = __fadd_rn(value, scales.m);
    if (Decode::kForm == Form::kSplitMin) {
      value = __fadd_rn(value, __fmul_rn(scales.m, __int2float_rn(scales.n[g])));
    }
    return value;
  };
  return make_float4(value_of(0), value_of(1), value_of(2), value_of(3));
}

template <GgmlType kType>
__device__ __forceinline__ float4 FourFloatValues(const PanelWords& raw, int four) {
  const auto value_of = [&](int place) {
    const int index = 4 * four + place;
    if (kType == GgmlType::kF32) return __uint_as_float(raw[index]);
    const uint32_t bits = HalfWordAt(raw, 2 * index);
    return kType == GgmlType::kF16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
  };
  return make_float4(value_of(0), value_of(1), value_of(2), value_of(3));
}

}  // namespace

__device__ void SegmentDot(GgmlType type, const uint8_t* unit, int lane, int blocks,
                           const Rows& rows, int first_block, int num_rows, float* acc) {
  switch (type) {
#define STRATA_CASE(name)                                                            \
  case GgmlType::k##name:                                                            \
    return num_rows == 1                                                             \
               ? Dot<Decode##name, 1>(unit, lane, blocks, rows, first_block, 1, acc) \
               : Dot<Decode##name, 2>(unit, lane, blocks, rows, first_block, num_rows, acc);
    STRATA_QUANTISED_TYPES(STRATA_CASE)
#undef STRATA_CASE
#define STRATA_CASE(name)                                                                        \
  case GgmlType::k##name:                                                                        \
    return num_rows == 1                                                                         \
               ? DotFloat<GgmlType::k##name, 1>(unit, lane, blocks, rows, first_block, 1, acc)   \
               : DotFloat<GgmlType::k##name, 2>(unit, lane, blocks, rows, first_block, num_rows, \
                                                acc);
    STRATA_FLOAT_TYPES(STRATA_CASE)
#undef STRATA_CASE
  }
}

__device__ float4 FourOfSegment(GgmlType type, const uint8_t* unit, int lane, int blocks,
                                int four) {
  PanelWords raw = {unit, lane, 0};
  switch (type) {
#define STRATA_CASE(name)                                         \
  case GgmlType::k##name:                                         \
    raw.chunk_words = SegmentWords<Decode##name>(blocks) / 4 * 4; \
    return FourValues<Decode##name>(raw, four);
    STRATA_QUANTISED_TYPES(STRATA_CASE)
#undef STRATA_CASE
#define STRATA_CASE(name)  \
  case GgmlType::k##name:  \
    raw.chunk_words = 256; \
    return FourFloatValues<GgmlType::k##name>(raw, four);
    STRATA_FLOAT_TYPES(STRATA_CASE)
#undef STRATA_CASE
  }
  return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

__device__ const uint32_t* BookWords(GgmlType type) { return books::Words(type); }

__device__ void StageGrid(GgmlType type, int copies, uint32_t* grid, int thread, int num_threads) {
  const uint32_t* source = books::Words(type);
  const int words = GridEntryWords(type);
  const int chunks = words * copies / 4;  // of 16 bytes, of one entry's copies
  for (int entry = thread; entry < GridEntries(type); entry += num_threads) {
    const uint32_t first = source[entry * words];
    const uint32_t second = source[entry * words + words - 1];
    uint32_t* to = InShared(grid) + entry * words * copies;
    for (int i = 0; i < chunks; ++i) {
      // Threads begin at different chunks, because entries lie in the same banks.
      const int chunk = (i + thread) & (chunks - 1);
      reinterpret_cast<uint4*>(to)[chunk] = make_uint4(first, second, first, second);
    }
    for (int i = chunks * 4; i < words * copies; ++i) to[i] = i % 2 == 0 ? first : second;
  }
}

}  // namespace strata
