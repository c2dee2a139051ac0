// The steps of qsa_attend's first kernel: a tile of cells for one key head and its query heads.
#pragma once

#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_cells.cuh"
#include "cuda/ops/qsa_parts.cuh"

namespace strata::attend {

constexpr int kAttendThreads = 256;
constexpr int kAttendWarps = kAttendThreads / 32;
constexpr int kAttendPairs = kAttendThreads / 2;       // pairs of channels
constexpr int kKeyCells = kAttendTile / kAttendWarps;  // of a warp
constexpr int kValueCells = kAttendTile / 2;           // of a thread: half of a tile
constexpr int kHeadStep = 4;                           // query heads at a time
constexpr int kMostHeadSteps = 3;                      // of a thread block

// An entry of a row's list of blocks and the one before it; -1 past the end, and 0 before the
// first.
struct Entry {
  int block;
  int before;
};

__device__ __forceinline__ Entry EntryAt(const QsaAttendArgs& a, const int32_t* blocks, int index) {
  if (a.ratio == 0) return {-1, -1};
  const int place = index / a.ratio;
  Entry entry = {-1, place == 0 ? 0 : -1};
  if (place < a.num_blocks) entry.block = blocks[place];
  if (place > 0 && place <= a.num_blocks) entry.before = blocks[place - 1];
  return entry;
}

// The cell at `index` of the row's list, -1 past its end. The cells behind the last complete block
// end the list, and they stand in the entry behind the last listed block, since they are fewer than
// a block has. A list that names cells the row does not see is refused by nobody here: they are
// left out, so that no foreign memory is read.
__device__ __forceinline__ int CellOf(const QsaAttendArgs& a, Entry entry, int visible, int index) {
  if (a.ratio == 0) return index < visible ? index : -1;
  const int tail = entry.before >= 0 ? visible / a.ratio : -1;
  const int64_t block = entry.block >= 0 ? entry.block : tail;
  const int64_t cell = block * a.ratio + index % a.ratio;
  return block >= 0 && cell < visible ? static_cast<int>(cell) : -1;
}

// What a thread block works on.
struct Part {
  int row;  // of this launch
  int slot;
  int kv_head;
  int head;   // the first query head
  int heads;  // how many
};

template <int kSteps>
struct AttendShared {
  static constexpr int kHeads = kHeadStep * kSteps;
  Part part;
  int next;   // item of this thread block
  int items;  // of the live rows
  int cells[kAttendTile];
  float4 weights[kAttendTile][kSteps];  // [cell][head]: scores, then their exponentials
  float top[kHeads];                    // the largest score of the slot's tiles so far
  float total[kHeads];                  // the weights' sum
  float rescale[kHeads];                // what earlier tiles' sums are worth under the new maximum
};

// Two vectors of four channels for each of the warp's cells, as they are stored, so that more loads
// fit into the registers. Where there is none cell 0 stands in, and its score is dropped.
template <typename Stored>
struct LoadedKeys {
  typename Stored::Four key[kKeyCells][2];
  float scale[kKeyCells][2];
};

template <typename Stored>
__device__ __forceinline__ void LoadKeys(const QsaAttendArgs& a, int kv_head, const int* cells,
                                         LoadedKeys<Stored>& to) {
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int channel = threadIdx.x % 32 * 4 + 128 * v;
#pragma unroll
    for (int c = 0; c < kKeyCells; ++c) {
      to.key[c][v] = {};
      to.scale[c][v] = 0.0f;
      if (channel < a.head_dim) {
        const int64_t head = static_cast<int64_t>(max(cells[c], 0)) * a.num_kv_heads + kv_head;
        to.key[c][v] = LoadFour<Stored>(a.cells.keys, head * a.head_dim + channel);
        to.scale[c][v] = LoadScale<Stored>(a.cells, head, a.head_dim, false, channel);
      }
    }
  }
}

// Two channels of each of the thread's cells, zeros where there is none.
template <typename Stored>
struct LoadedValues {
  typename Stored::Two value[kValueCells];
  float scale[kValueCells];
};

template <typename Stored>
__device__ __forceinline__ void LoadValues(const QsaAttendArgs& a, int kv_head, const int* cells,
                                           LoadedValues<Stored>& to) {
  const int column = threadIdx.x % kAttendPairs * 2;
#pragma unroll
  for (int c = 0; c < kValueCells; ++c) {
    to.value[c] = {};
    to.scale[c] = 0.0f;
    if (cells[c] >= 0 && column < a.head_dim) {
      const int64_t head = static_cast<int64_t>(cells[c]) * a.num_kv_heads + kv_head;
      to.value[c] = LoadTwo<Stored>(a.cells.values, head * a.head_dim + column);
      to.scale[c] = LoadScale<Stored>(a.cells, head, a.head_dim, true, column);
    }
  }
}

__device__ __forceinline__ float Dot(float4 a, float4 b, float sum) {
  sum = __fmaf_rn(a.x, b.x, sum);
  sum = __fmaf_rn(a.y, b.y, sum);
  sum = __fmaf_rn(a.z, b.z, sum);
  return __fmaf_rn(a.w, b.w, sum);
}

// shared.weights <- q . key for the warp's cells; q [heads, C].
template <typename Stored, int kSteps>
__device__ __forceinline__ void Score(const LoadedKeys<Stored>& loaded, const float* q, int dim,
                                      AttendShared<kSteps>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float4 key[kKeyCells][2];
#pragma unroll
  for (int c = 0; c < kKeyCells; ++c) {
#pragma unroll
    for (int v = 0; v < 2; ++v) key[c][v] = Stored::Widen(loaded.key[c][v], loaded.scale[c][v]);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float x[kKeyCells * kHeadStep] = {};
#pragma unroll
    for (int h = 0; h < kHeadStep; ++h) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int channel = lane * 4 + 128 * v;
        if (channel >= dim) continue;
        const float4 query =
            *reinterpret_cast<const float4*>(q + (step * kHeadStep + h) * dim + channel);
#pragma unroll
        for (int c = 0; c < kKeyCells; ++c) {
          x[c * kHeadStep + h] = Dot(query, key[c][v], x[c * kHeadStep + h]);
        }
      }
    }
    Halve<8>(x, lane, 16);
    Halve<4>(x, lane, 8);
    Halve<2>(x, lane, 4);
    Halve<1>(x, lane, 2);
    const float sum = x[0] + __shfl_xor_sync(kAllLanes, x[0], 1);
    if (lane % 2 == 0) {
      const int cell = lane / 8, head = lane / 2 % kHeadStep;
      (&shared.weights[warp * kKeyCells + cell][step].x)[head] = sum;
    }
  }
}

// Scores to exponentials below the slot's maximum so far; a warp has every eighth head.
template <int kSteps>
__device__ __forceinline__ void Softmax(float scale, bool first_tile,
                                        AttendShared<kSteps>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int head = warp; head < kHeadStep * kSteps; head += kAttendWarps) {
    float* place = &shared.weights[lane][0].x + head;
    const float score = shared.cells[lane] >= 0 ? *place * scale : -INFINITY;
    const float before = first_tile ? -INFINITY : shared.top[head];
    const float top = fmaxf(WarpMax(score), before);
    const float weight = expf(score - top);
    const float rescale = expf(before - top);
    const float total = WarpSum(weight);
    *place = weight;
    __syncwarp();  // all lanes have read the maximum
    if (lane == 0) {
      shared.top[head] = top;
      shared.total[head] = first_tile ? total : __fmaf_rn(shared.total[head], rescale, total);
      shared.rescale[head] = rescale;
    }
  }
}

// The weighted sums of the values of half a tile's cells, from `first_cell` on.
template <typename Stored, int kSteps>
__device__ __forceinline__ void AddValues(const LoadedValues<Stored>& loaded, int first_cell,
                                          const AttendShared<kSteps>& shared,
                                          float2 (&sum)[kHeadStep * kSteps]) {
#pragma unroll
  for (int c = 0; c < kValueCells; ++c) {
    const float2 value = Stored::Widen(loaded.value[c], loaded.scale[c]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float4 weight = shared.weights[first_cell + c][step];
      const float each[kHeadStep] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
      for (int h = 0; h < kHeadStep; ++h) {
        float2& to = sum[step * kHeadStep + h];
        to.x = __fmaf_rn(each[h], value.x, to.x);
        to.y = __fmaf_rn(each[h], value.y, to.y);
      }
    }
  }
}

// Adds the sums of the two halves of the cells, and those of the slot's earlier tiles, to `to`
// [heads, C]; each half of the threads has half of the heads. Between tiles the sums wait in `to`,
// not in registers, which the next tile's loads need.
template <int kSteps>
__device__ __forceinline__ void WriteSums(const float2 (&sum)[kHeadStep * kSteps], int dim,
                                          bool first_tile, float* to, float2* other,
                                          const AttendShared<kSteps>& shared) {
  constexpr int kHeads = kHeadStep * kSteps;
  const int half = threadIdx.x / kAttendPairs, pair = threadIdx.x % kAttendPairs;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h / (kHeads / 2) != half) other[h * kAttendPairs + pair] = sum[h];
  }
  __syncthreads();
  if (2 * pair >= dim) return;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h / (kHeads / 2) != half || h >= shared.part.heads) continue;
    float2* place = reinterpret_cast<float2*>(to + h * dim + 2 * pair);
    const float2 more = other[h * kAttendPairs + pair];
    float2 all = make_float2(sum[h].x + more.x, sum[h].y + more.y);
    if (!first_tile) {
      const float2 before = *place;
      all.x = __fmaf_rn(before.x, shared.rescale[h], all.x);
      all.y = __fmaf_rn(before.y, shared.rescale[h], all.y);
    }
    *place = all;
  }
}

}  // namespace strata::attend
