// How qsa_attend's kernel for tiles keeps cells in shared memory and makes fragments of them, for
// halves and for int8 codes.
//
// A slot of a ring holds the keys or the values of 16 cells, a row each, its chunks of 16 bytes
// exchanged by the cell's number so that eight cells' chunks of one number lie in different banks.
// Lane l of a fragment is g = l / 4, t = l % 4. Which number of a sum stands for which channel is
// free as long as both sides agree: Channel says it for the queries, OutChannel for the results.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_cells.cuh"

namespace strata::attend_tiles {

constexpr int kDim = 256;
constexpr int kUnit = 16;  // cells
constexpr int kGroups = kDim / kScaleValues;
constexpr int kHeadRows = 16;  // query heads of a key head, at most

// Two codes in bytes 0 and 2, whatever the others hold, as halves: code / 128. The byte with its
// sign bit turned is the end of the mantissa of 8 + (code + 128) / 128.
__device__ __forceinline__ uint32_t HalvesOfCodes(uint32_t bytes) {
  const uint32_t shifted = (bytes & 0x00ff00ffu) ^ 0x48804880u;
#if defined(STRATA_EMULATE)
  return PackF16(HalfToFloat(shifted & 0xffffu) - 9.0f, HalfToFloat(shifted >> 16) - 9.0f);
#else
  uint32_t halves;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(shifted), "r"(0x48804880u));
  return halves;
#endif
}

// The queries of a key head's heads, rounded: the left side of the scores.
using Queries = uint32_t[kDim / 16][4];
// Sums over cells of weight times value: [product][2 of head g, 2 of head g + 8].
using Sums = float[kDim / 8][4];

// The scores of a unit: cell 8 j + 2 t + c of heads g and g + 8 at [j][c] and [j][2 + c].
using Scores = float[2][4];

template <typename Stored>
struct Form;

template <>
struct Form<Float16Cells> {
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kSlots = 3;  // 24 KB a warp
  static constexpr int kScaleFloats = 0;

  static __device__ __forceinline__ int Channel(int step, int t, int half) {
    return 16 * step + 8 * half + 2 * t;
  }
  static __device__ __forceinline__ int OutChannel(int pair, int t) { return 8 * pair + 2 * t; }
  static __device__ __forceinline__ float2 Out(const Sums& sums, int pair, int half) {
    return make_float2(sums[pair][2 * half], sums[pair][2 * half + 1]);
  }

  static __device__ __forceinline__ void Score(const Queries& q, const uint8_t* slot, const float*,
                                               Scores& scores) {
    const int lane = threadIdx.x % 32, cell = lane / 16 * 8 + lane % 8;
    const uint8_t* row = slot + cell * kRowBytes;
    Scores odd = {};  // two chains of sums are waited for half as long
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      LoadMatrices(b, row + ((2 * step + lane / 8 % 2) ^ (cell & 7)) * 16);
      Scores& to = step % 2 == 0 ? scores : odd;
      MmaF16(to[0], q[step], b[0], b[1]);
      MmaF16(to[1], q[step], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  static __device__ __forceinline__ void Add(const Scores& weights, const uint8_t* slot,
                                             const float*, Sums& sums) {
    const int lane = threadIdx.x % 32, cell = lane % 16;
    const uint8_t* row = slot + cell * kRowBytes;
    const uint32_t a[4] = {
        PackF16(weights[0][0], weights[0][1]), PackF16(weights[0][2], weights[0][3]),
        PackF16(weights[1][0], weights[1][1]), PackF16(weights[1][2], weights[1][3])};
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t b[4];
      LoadTransposed(b, row + ((2 * pair + lane / 16) ^ (cell & 7)) * 16);
      MmaF16(sums[2 * pair], a, b[0], b[1]);
      MmaF16(sums[2 * pair + 1], a, b[2], b[3]);
    }
  }
};

template <>
struct Form<Int8Cells> {
  static constexpr int kRowBytes = kDim;
  static constexpr int kSlots = 5;                          // 20 KB a warp
  static constexpr int kScaleFloats = kUnit * 2 * kGroups;  // of a unit

  static __device__ __forceinline__ int Channel(int step, int t, int half) {
    return 16 * step + 4 * t + 2 * half;
  }
  static __device__ __forceinline__ int OutChannel(int pair, int t) {
    return pair / 8 * kScaleValues + 16 * t + pair % 8 * 2;
  }
  static __device__ __forceinline__ float2 Out(const Sums& sums, int pair, int half) {
    const int first = pair / 8 * 8 + 2 * pair % 8, column = 2 * half + pair % 8 / 4;
    return make_float2(sums[first][column], sums[first + 1][column]);
  }

  static __device__ __forceinline__ void Score(const Queries& q, const uint8_t* slot,
                                               const float* scales, Scores& scores) {
    const int lane = threadIdx.x % 32, cell = lane / 8 % 2 * 8 + lane % 8, t = lane % 4;
    const uint8_t* row = slot + cell * kRowBytes;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      Scores sum = {};
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int step = 4 * group + 2 * pair;
        uint32_t w[4];
        LoadMatrices(w, row + ((step + lane / 16) ^ (cell & 7)) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          MmaF16(sum[i % 2], q[step + i / 2], HalvesOfCodes(__byte_perm(w[i], 0, 0x4140)),
                 HalvesOfCodes(__byte_perm(w[i], 0, 0x4342)));
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int of = 8 * (i / 4) + 2 * t + i % 2;
        const float scale = 128.0f * scales[of * 2 * kGroups + group];
        scores[i / 4][i % 4] = __fmaf_rn(sum[i / 4][i % 4], scale, scores[i / 4][i % 4]);
      }
    }
  }

  static __device__ __forceinline__ void Add(const Scores& weights, const uint8_t* slot,
                                             const float* scales, Sums& sums) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint2 codes[4];
      float scale[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int cell = 8 * (i / 2) + 2 * t + i % 2;
        const int chunk = (4 * group + g / 2) ^ (cell & 7);
        codes[i] =
            *reinterpret_cast<const uint2*>(slot + cell * kRowBytes + chunk * 16 + g % 2 * 8);
        scale[i] = 128.0f * scales[(cell * 2 + 1) * kGroups + group];
      }
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&w)[4] = weights[i / 2];
        a[i] = PackF16(w[i % 2 * 2] * scale[i / 2 * 2], w[i % 2 * 2 + 1] * scale[i / 2 * 2 + 1]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned place = j % 4, bytes = place | (4 + place) << 8;
        const auto word = [&](int i) { return j < 4 ? codes[i].x : codes[i].y; };
        MmaF16(sums[8 * group + j], a,
               HalvesOfCodes(__byte_perm(word(0), word(1), bytes | bytes << 4)),
               HalvesOfCodes(__byte_perm(word(2), word(3), bytes | bytes << 4)));
      }
    }
  }
};

}  // namespace strata::attend_tiles
