// Products of many float32 rows with matrices that are not quantised, by bfloat16 matrix units.
//
// A float is split into two bfloat16, x = high + low + (an error below 2^-17 |x|), and the products
// high * high, low * high and, unless the weights are bfloat16 themselves, high * low are added in
// float32. Sums run over the 64 values of a step in the matrix unit, its steps are added up to a
// segment of 256 values, and segments to a total: an order that knows neither the number of rows
// nor a row's place, so a row's bits depend on the row alone. They are not those of the kernels for
// few rows (contract C: prompts and windows are told apart by the read map).
//
// A block of 256 threads computes 64 rows x 64 columns (two panels). Weights and rows of the next
// step are on their way in registers while the current one is multiplied.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/products.cuh"

namespace strata::floats {

inline constexpr int kTileRows = 64;
inline constexpr int kTileColumns = 64;
inline constexpr int kThreads = 256;
inline constexpr int kStep = 64;            // values of a row in shared memory at once
inline constexpr int kPlane = 64 * 128;     // bytes: 64 rows of a step
inline constexpr int kStage = 4 * kPlane;   // rows high, low, weights high, low
inline constexpr int kShared = 2 * kStage;  // dynamic shared bytes of a block

// Eight floats as two chunks of bfloat16.
struct SplitChunk {
  uint4 high, low;
};

__device__ __forceinline__ void SplitPair(float a, float b, uint32_t* high, uint32_t* low) {
  *high = PackBf16(a, b);
  *low = PackBf16(__fsub_rn(a, __uint_as_float(*high << 16)),
                  __fsub_rn(b, __uint_as_float(*high & 0xffff0000u)));
}

__device__ __forceinline__ SplitChunk Split(const float4& a, const float4& b) {
  SplitChunk s;
  SplitPair(a.x, a.y, &s.high.x, &s.low.x);
  SplitPair(a.z, a.w, &s.high.y, &s.low.y);
  SplitPair(b.x, b.y, &s.high.z, &s.low.z);
  SplitPair(b.z, b.w, &s.high.w, &s.low.w);
  return s;
}

// Weights of a type as they are read: chunks of 8 values of a panel's row.
template <GgmlType kType>
struct WeightChunk {
  static constexpr int kWords = kType == GgmlType::kF32 ? 8 : 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void Load(const uint8_t* unit, int chunk, int lane) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 v =
          __ldg(reinterpret_cast<const uint4*>(unit) + (chunk * (kWords / 4) + i) * 32 + lane);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  __device__ __forceinline__ SplitChunk Value() const {
    if constexpr (kType == GgmlType::kBF16) {
      const uint4 zero = make_uint4(0, 0, 0, 0);
      return {make_uint4(words[0], words[1], words[2], words[3]), zero};
    } else if constexpr (kType == GgmlType::kF16) {
      float f[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f[2 * i] = HalfToFloat(words[i] & 0xffffu);
        f[2 * i + 1] = HalfToFloat(words[i] >> 16);
      }
      return Split(make_float4(f[0], f[1], f[2], f[3]), make_float4(f[4], f[5], f[6], f[7]));
    } else {
      const auto four = [&](int i) {
        return make_float4(__uint_as_float(words[i]), __uint_as_float(words[i + 1]),
                           __uint_as_float(words[i + 2]), __uint_as_float(words[i + 3]));
      };
      return Split(four(0), four(4));
    }
  }
};

// The share of one thread in a step's inputs: two chunks of rows, two of weights.
template <GgmlType kType, typename LoadX>
struct StepInputs {
  float4 x[2][2];
  WeightChunk<kType> w[2];

  __device__ __forceinline__ void Load(const PanelMatrix& m, int first_panel, int k0,
                                       const LoadX& load) {
    const int thread = static_cast<int>(threadIdx.x);
    const int k = k0 + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool in = k < m.cols;
      x[i][0] = in ? load(thread / 8 + 32 * i, k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      x[i][1] = in ? load(thread / 8 + 32 * i, k + 4) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const int chunk = thread / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int panel = first_panel + i;
      if (k0 + chunk * 8 < m.cols && panel * 32 < m.rows) {
        const uint8_t* unit =
            m.bytes + panel * m.panel_bytes + static_cast<int64_t>(k0 / 256) * m.unit_bytes;
        w[i].Load(unit, k0 % 256 / 8 + chunk, thread % 32);
      } else {
        w[i].Clear();
      }
    }
  }

  __device__ __forceinline__ void Store(uint8_t* stage) const {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitChunk rows = Split(x[i][0], x[i][1]);
      const int at = SwizzledAt(thread / 8 + 32 * i, thread % 8);
      *reinterpret_cast<uint4*>(stage + at) = rows.high;
      *reinterpret_cast<uint4*>(stage + kPlane + at) = rows.low;
      const SplitChunk weights = w[i].Value();
      const int to = 2 * kPlane + SwizzledAt(32 * i + thread % 32, thread / 32);
      *reinterpret_cast<uint4*>(stage + to) = weights.high;
      if constexpr (kType != GgmlType::kBF16) {
        *reinterpret_cast<uint4*>(stage + kPlane + to) = weights.low;
      }
    }
  }
};

// One step for the warp's 16 rows x 32 columns.
template <GgmlType kType>
__device__ __forceinline__ void MultiplyStep(const uint8_t* stage, float (&acc)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp % 4 * 16 + lane % 16;
  const int column = warp / 4 * 32 + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t high[4], low[4];
    LoadMatrices(high, stage + SwizzledAt(row, 2 * k + lane / 16));
    LoadMatrices(low, stage + kPlane + SwizzledAt(row, 2 * k + lane / 16));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int at = 2 * kPlane + SwizzledAt(column + 16 * pair, 2 * k + lane / 8 % 2);
      uint32_t w[4];
      LoadMatrices(w, stage + at);
      MmaBf16(acc[2 * pair], low, w[0], w[1]);
      MmaBf16(acc[2 * pair + 1], low, w[2], w[3]);
      MmaBf16(acc[2 * pair], high, w[0], w[1]);
      MmaBf16(acc[2 * pair + 1], high, w[2], w[3]);
      if constexpr (kType != GgmlType::kBF16) {
        LoadMatrices(w, stage + kPlane + at);
        MmaBf16(acc[2 * pair], high, w[0], w[1]);
        MmaBf16(acc[2 * pair + 1], high, w[2], w[3]);
      }
    }
  }
}

// The products of 64 rows with the matrix's columns of panels `first_panel` and the next, by a
// whole block of kThreads; `shared`: kShared bytes, 16-byte aligned, free again after a barrier.
//   load(row, k) -> float4   values k..k + 3 of row 0..63 of the tile; k is a multiple of 4 below
//                            the matrix's columns; zeros for rows that do not count
//   store(row, column, sum)  column: a row of the matrix; each (row, column) comes once
template <GgmlType kType, typename LoadX, typename StoreY>
__device__ __forceinline__ void Tile(const PanelMatrix& m, int first_panel, const LoadX& load,
                                     const StoreY& store, uint8_t* shared) {
  float total[4][4] = {}, acc[4][4] = {};
  StepInputs<kType, LoadX> inputs;
  inputs.Load(m, first_panel, 0, load);
  int stage = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < m.cols; k0 += kStep) {
    inputs.Store(shared + stage);
    // One barrier a step: who is past it has read the other stage, which is written next.
    __syncthreads();
    if (k0 + kStep < m.cols) inputs.Load(m, first_panel, k0 + kStep, load);
    MultiplyStep<kType>(shared + stage, acc);
    stage = kStage - stage;
    if ((k0 + kStep) % 256 != 0 && k0 + kStep < m.cols) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[i][j] = __fadd_rn(total[i][j], acc[i][j]);
        acc[i][j] = 0.0f;
      }
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = warp % 4 * 16 + lane / 4 + j / 2 * 8;
      const int column = first_panel * 32 + warp / 4 * 32 + i * 8 + lane % 4 * 2 + j % 2;
      if (column < m.rows) store(row, column, total[i][j]);
    }
  }
}

}  // namespace strata::floats
