// The products of segment_dot.cuh as templates over the decoder, for its dispatcher and for kernels
// that are built for one type: those keep more in registers, because a call saves some of them.
#pragma once

#include "cuda/segment_dot.cuh"
#include "cuda/segments.cuh"
#include "cuda/segments_grids.cuh"
#include "cuda/segments_kquants.cuh"
#include "cuda/segments_small.cuh"

// The types with a decoder.
#define STRATA_QUANTISED_TYPES(X) \
  X(Q4_0)                         \
  X(Q4_1)                         \
  X(Q5_0)                         \
  X(Q5_1)                         \
  X(Q8_0)                         \
  X(Q2_K)                         \
  X(Q3_K)                         \
  X(Q4_K)                         \
  X(Q5_K)                         \
  X(Q6_K)                         \
  X(IQ2_XXS)                      \
  X(IQ2_XS)                       \
  X(IQ2_S)                        \
  X(IQ3_XXS)                      \
  X(IQ3_S)                        \
  X(IQ1_S)                        \
  X(IQ1_M)                        \
  X(IQ4_NL)                       \
  X(IQ4_XS)                       \
  X(MXFP4)                        \
  X(Q1_0)                         \
  X(Q2_0)
#define STRATA_FLOAT_TYPES(X) X(F32) X(F16) X(BF16)

namespace strata {

// What types without a code book are given in place of one.
struct NoBook {};

// A lane's copy of a code book in shared memory, as StageGrid writes it.
struct SharedBook {
  const uint8_t* first;
  uint32_t stride;  // bytes from one entry to the next

  __device__ __forceinline__ uint32_t Word(uint32_t index) const {
    return *reinterpret_cast<const uint32_t*>(InShared(first) + index * stride);
  }
  __device__ __forceinline__ uint2 Pair(uint32_t index) const {
    return *reinterpret_cast<const uint2*>(InShared(first) + index * stride);
  }
};

template <typename Decode>
__device__ __forceinline__ auto BookOf(const Rows& rows, int lane) {
  if constexpr (GridEntries(Decode::kType) == 0) {
    return NoBook{};
  } else {
    constexpr int kWords = GridEntryWords(Decode::kType);
    const uint32_t* first = rows.grid + (lane & (rows.grid_copies - 1)) * kWords;
    return SharedBook{reinterpret_cast<const uint8_t*>(first),
                      static_cast<uint32_t>(rows.grid_copies * kWords * 4)};
  }
}

// One block of activations of one row.
struct ActivationBlock {
  int q[8];
  float scale;
  int sum;      // of the codes
  int sums[2];  // of each 16: for forms that tell them apart
};

template <typename Decode>
__device__ __forceinline__ ActivationBlock LoadActivations(const Rows& rows, int row, int block) {
  ActivationBlock x;
  const int8_t* codes = InShared(rows.codes) + row * rows.width + 32 * block;
  const int4 low = *reinterpret_cast<const int4*>(codes);
  const int4 high = *reinterpret_cast<const int4*>(codes + 16);
  x.q[0] = low.x, x.q[1] = low.y, x.q[2] = low.z, x.q[3] = low.w;
  x.q[4] = high.x, x.q[5] = high.y, x.q[6] = high.z, x.q[7] = high.w;
  x.scale = InShared(rows.scales)[row * (rows.width / 32) + block];
  if (Decode::kAdd != 0 || Decode::kForm == Form::kMin || Decode::kForm == Form::kSplitMin) {
    const int16_t* sums = InShared(rows.sums) + row * (rows.width / 16) + 2 * block;
    const int both = *reinterpret_cast<const int*>(sums);
    x.sum = __dp2a_lo(both, 0x0101, 0);
    x.sums[0] = static_cast<int16_t>(both);
    x.sums[1] = both >> 16;
  }
  return x;
}

// sum(w * q) over values 4 * kFirst to 4 * kEnd - 1 of a block, from its words of codes; `sum` is
// that of these q.
template <typename Decode, int kFirst, int kEnd>
__device__ __forceinline__ int CodesDot(const uint32_t* w, const ActivationBlock& x, int sum) {
  int dot = 0;
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i) dot = __dp4a(static_cast<int>(w[i]), x.q[i], dot);
  if (Decode::kSecond != 0) {
    // One chain where the second words are added: fewer instructions count, not their order.
    int second = Decode::kSecond == 1 ? dot : 0;
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      second = __dp4a(static_cast<int>(w[8 + i]), x.q[i], second);
    }
    dot = Decode::kSecond == 1 ? second : dot + Decode::kSecond * second;
  }
  dot *= Decode::kMultiply;
  if (Decode::kAdd != 0) dot += Decode::kAdd * sum;
  return dot;
}

// What a block of weights contributes besides its codes.
struct BlockScales {
  float d;
  float m;
  int k[2];
  int n[2];
};

template <typename Decode, typename Raw>
__device__ __forceinline__ BlockScales LoadScales(const Raw& raw, int b) {
  BlockScales scales;
  scales.d = Decode::D(raw, b);
  if constexpr (Decode::kForm == Form::kMin || Decode::kForm == Form::kSplitMin) {
    scales.m = Decode::M(raw, b);
  }
  if constexpr (Decode::kForm == Form::kSplit || Decode::kForm == Form::kSplitMin) {
    scales.k[0] = Decode::K(raw, 2 * b);
    scales.k[1] = Decode::K(raw, 2 * b + 1);
  }
  if constexpr (Decode::kForm == Form::kSplitMin) {
    scales.n[0] = Decode::N(raw, 2 * b);
    scales.n[1] = Decode::N(raw, 2 * b + 1);
  }
  return scales;
}

// acc + the block's terms, in contract T's order.
template <typename Decode>
__device__ __forceinline__ float AddBlock(const uint32_t* w, const BlockScales& scales,
                                          const ActivationBlock& x, float acc) {
  int sum = 0;
  if constexpr (Decode::kForm == Form::kSplit || Decode::kForm == Form::kSplitMin) {
    sum = scales.k[0] * CodesDot<Decode, 0, 4>(w, x, x.sums[0]) +
          scales.k[1] * CodesDot<Decode, 4, 8>(w, x, x.sums[1]);
  } else {
    sum = CodesDot<Decode, 0, 8>(w, x, x.sum);
  }
  acc = __fmaf_rn(__int2float_rn(sum), __fmul_rn(scales.d, x.scale), acc);
  if constexpr (Decode::kForm == Form::kMin) {
    acc = __fmaf_rn(__int2float_rn(x.sum), __fmul_rn(scales.m, x.scale), acc);
  }
  if constexpr (Decode::kForm == Form::kSplitMin) {
    const int minimum = scales.n[0] * x.sums[0] + scales.n[1] * x.sums[1];
    acc = __fmaf_rn(__int2float_rn(minimum), __fmul_rn(scales.m, x.scale), acc);
  }
  return acc;
}

// Block b for kRows activation rows.
template <typename Decode, int kRows, typename Raw, typename Book>
__device__ __forceinline__ void BlockDot(const Raw& raw, const Book& book, const Rows& rows,
                                         const int (&row)[kRows], int first_block, int b,
                                         float (&acc)[kRows]) {
  uint32_t w[Decode::kSecond != 0 ? 16 : 8];
  Decode::Codes(raw, b, book, w);
  const BlockScales scales = LoadScales<Decode>(raw, b);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const ActivationBlock x = LoadActivations<Decode>(rows, row[r], first_block + b);
    acc[r] = AddBlock<Decode>(w, scales, x, acc[r]);
  }
}

// A decoder's row in the table of types.
template <typename Decode>
inline constexpr TypeInfo kInfo = *FindType(static_cast<int64_t>(Decode::kType));

// 32-bit words of a segment of `blocks` blocks of 32.
template <typename Decode>
__host__ __device__ constexpr int SegmentWords(int blocks) {
  constexpr int kBytes = kInfo<Decode>.block_bytes, kValues = kInfo<Decode>.block_values;
  return (blocks * 32 / kValues * kBytes + 3) / 4;
}

// Up to kRows activation rows that share a decoded block: `first` and those after it.
template <int kRows>
struct RowGroup {
  int row[kRows];
  float sums[kRows];

  __device__ __forceinline__ RowGroup(int first, int num_rows) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r] = kRows == 1 ? first : min(first + r, num_rows - 1);  // the last, again
      sums[r] = 0.0f;
    }
  }
  __device__ __forceinline__ void Store(float* acc) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[row[r]] = sums[r];
  }
};

// The sums of a segment of kBlocks blocks whose words are in registers: for kernels that ask for
// them long before. Row r's sum goes to acc[r * stride].
template <typename Decode, int kRows, int kBlocks, int kWords>
__device__ __forceinline__ void LoadedSums(RawWords<kWords>* raw, int lane, const Rows& rows,
                                           int first_block, int num_rows, float* acc) {
  const auto book = BookOf<Decode>(rows, lane);
  for (int first = 0; first < num_rows; first += kRows) {
    if (kRows > 1) Forget(raw);
    RowGroup<kRows> group(first, num_rows);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      BlockDot<Decode>(*raw, book, rows, group.row, first_block, b, group.sums);
    }
    group.Store(acc);
  }
}

// kRows activation rows from `first` on (after the last that one again) with a whole segment of a
// type without a code book.
template <typename Decode, int kRows, int kWords>
__device__ __forceinline__ void SumsOfRows(const RawWords<kWords>& raw, const Rows& rows,
                                           int first_block, int first, int num_rows, float* to) {
  RowGroup<kRows> group(first, num_rows);
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    BlockDot<Decode>(raw, NoBook{}, rows, group.row, first_block, b, group.sums);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) to[group.row[r] * 32] = group.sums[r];
}

// to[r * 32] <- the sum of row r, in passes of four rows: codes unpacked once serve them all.
template <typename Decode, int kWords>
__device__ __forceinline__ void SumsInto(RawWords<kWords>* raw, const Rows& rows, int segment,
                                         int num_rows, float* to) {
  if (num_rows == 1) return SumsOfRows<Decode, 1>(*raw, rows, 8 * segment, 0, 1, to);
  if (num_rows == 2) return SumsOfRows<Decode, 2>(*raw, rows, 8 * segment, 0, 2, to);
#pragma unroll 1
  for (int r = 0; r < num_rows; r += 4) {
    Forget(raw);
    SumsOfRows<Decode, 4>(*raw, rows, 8 * segment, r, num_rows, to);
  }
}

// LoadedSums with the loads before it.
template <typename Decode, int kRows, int kBlocks>
__device__ __forceinline__ void SegmentSums(const uint8_t* unit, int lane, const Rows& rows,
                                            int first_block, int num_rows, float* acc) {
  RawWords<SegmentWords<Decode>(kBlocks)> raw;
  LoadWords(unit, lane, &raw);
  first_block += AfterLoads(raw, rows.width);
  LoadedSums<Decode, kRows, kBlocks>(&raw, lane, rows, first_block, num_rows, acc);
}

// The same for any number of blocks, read block by block.
template <typename Decode>
__device__ __forceinline__ void ShortSums(const uint8_t* unit, int lane, int blocks,
                                          const Rows& rows, int first_block, int num_rows,
                                          float* acc) {
  const PanelWords raw = {unit, lane, SegmentWords<Decode>(blocks) / 4 * 4};
  for (int first = 0; first < num_rows; ++first) {
    RowGroup<1> group(first, num_rows);
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      BlockDot<Decode>(raw, NoBook{}, rows, group.row, first_block, b, group.sums);
    }
    group.Store(acc);
  }
}

// SegmentDot for one type, in passes of kRows activation rows. Rows of 640 values end in 4 blocks.
template <typename Decode, int kRows>
__device__ __forceinline__ void SegmentBody(const uint8_t* unit, int lane, int blocks,
                                            const Rows& rows, int first_block, int num_rows,
                                            float* acc) {
  if (kInfo<Decode>.block_values == 256 || blocks == 8) {
    SegmentSums<Decode, kRows, 8>(unit, lane, rows, first_block, num_rows, acc);
  } else if constexpr (kInfo<Decode>.block_values < 256) {
    if (blocks == 4) {
      SegmentSums<Decode, kRows, 4>(unit, lane, rows, first_block, num_rows, acc);
    } else {
      ShortSums<Decode>(unit, lane, blocks, rows, first_block, num_rows, acc);
    }
  }
}

// Types that are not quantised: four values from 4 words or 2.
template <GgmlType kType>
__device__ __forceinline__ float4 FourFloats(const uint32_t* words) {
  if (kType == GgmlType::kF16) {
    return make_float4(HalfToFloat(words[0] & 0xffffu), HalfToFloat(words[0] >> 16),
                       HalfToFloat(words[1] & 0xffffu), HalfToFloat(words[1] >> 16));
  }
  if (kType == GgmlType::kBF16) {
    return make_float4(Bf16ToFloat(words[0] & 0xffffu), Bf16ToFloat(words[0] >> 16),
                       Bf16ToFloat(words[1] & 0xffffu), Bf16ToFloat(words[1] >> 16));
  }
  return make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]),
                     __uint_as_float(words[2]), __uint_as_float(words[3]));
}

// SegmentDot for them. A block's bytes are whole chunks, so a short segment is a shorter loop.
template <GgmlType kType, int kRows>
__device__ __forceinline__ void FloatBody(const uint8_t* unit, int lane, int blocks,
                                          const Rows& rows, int first_block, int num_rows,
                                          float* acc) {
  constexpr int kChunks = kType == GgmlType::kF32 ? 8 : 4;  // of a block
  constexpr int kWordsOfFour = kChunks / 2;
  for (int first = 0; first < num_rows; first += kRows) {
    RowGroup<kRows> group(first, num_rows);
#pragma unroll 2
    for (int b = 0; b < blocks; ++b) {
      RawWords<4 * kChunks> raw;
      LoadWords(unit + b * kChunks * 512, lane, &raw);
      float products[kRows] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 w = FourFloats<kType>(raw.words + kWordsOfFour * i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* values = rows.x + static_cast<int64_t>(group.row[r]) * rows.width;
          const float4 x =
              *reinterpret_cast<const float4*>(values + 32 * (first_block + b) + 4 * i);
          products[r] = __fmaf_rn(w.x, x.x, products[r]);
          products[r] = __fmaf_rn(w.y, x.y, products[r]);
          products[r] = __fmaf_rn(w.z, x.z, products[r]);
          products[r] = __fmaf_rn(w.w, x.w, products[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) group.sums[r] = __fadd_rn(group.sums[r], products[r]);
    }
    group.Store(acc);
  }
}

}  // namespace strata
