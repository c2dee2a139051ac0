// The kernels of expert_ffn_tiles.cu: products of 64 entries of one expert with 128 weight rows.
//
// A stage of weights (128 values of 128 rows) is decoded from its panels into shared memory while
// the one before is multiplied: half of the warps decode first and half multiply first, so neither
// waits for the other's part of the processor. Rows arrive by asynchronous copies.
#pragma once

#include "cuda/expert_word.h"
#include "cuda/ops/expert_tile_weights.cuh"
#include "cuda/reduce.cuh"
#include "cuda/tile_rows.h"

namespace strata::expert_tiles {

using tiles::QuantizedRows;

// A thread's share in copying the tile's activation rows.
template <typename Stage>
struct RowCopies {
  const int8_t* codes[2];
  const void* other;
  int32_t step;
  bool valid[2], other_valid;

  // row_of(i) -> the activation row of the tile's i-th entry.
  template <typename RowOf>
  __device__ __forceinline__ RowCopies(const QuantizedRows& x, int count, const RowOf& row_of) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread / 8 + 32 * i;
      valid[i] = row < count;
      codes[i] = x.codes + (valid[i] ? row_of(row) : 0) * x.values + thread % 8 * 16;
    }
    // Scales, a chunk a row, then sums, two chunks a row: they follow each other in the stage.
    const int row = thread < kTileRows ? thread : (thread - kTileRows) / 2;
    other_valid = row < count;
    const int64_t from = other_valid ? row_of(row) : 0;
    if (thread < kTileRows) {
      other = x.scales + from * (x.values / 32);
      step = 16;
    } else {
      other = x.sums + from * (x.values / 16) + thread % 2 * 4;
      step = 32;
    }
  }

  __device__ __forceinline__ void Next(uint8_t* stage) {
    const int thread = static_cast<int>(threadIdx.x);
    uint8_t* to = stage + Stage::kRowCodes + SwizzledAt(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      CopyAsync(to + i * 32 * 128, codes[i], valid[i]);
      codes[i] += tiles::kStageValues;
    }
    if (thread < kTileRows) {
      CopyAsync(stage + Stage::kRowScales + thread * 16, other, other_valid);
    } else if (tiles::HasMinimum(Stage::kOf) && thread < 3 * kTileRows) {
      CopyAsync(stage + Stage::kRowSums + (thread - kTileRows) * 16, other, other_valid);
    }
    other = static_cast<const uint8_t*>(other) + step;
  }
};

using Sums = float[kGroups][2][4];

// The products of a tile: total[i][j] of rows 16 i and the two groups of columns of `part`.
template <typename Weights, typename Stage>
__device__ __forceinline__ void MultiplyTile(RowCopies<Stage>& rows, int count,
                                             const WeightPanels& w, const Rows& book,
                                             const tiles::WarpPart& part, uint8_t* shared,
                                             Sums& total) {
  const tiles::Start start(shared);
  Sums acc = {};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int active = __shfl_sync(kAllLanes, (count + 15) / 16, 0);
  const int stages = (w.cols + tiles::kStageValues - 1) / tiles::kStageValues;
  rows.Next(shared);
  DecodeStage<Stage>(Weights{}, w, 0, book, shared);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    WaitForCopies();
    // Who is past this barrier has done with the other half, which is filled next.
    __syncthreads();
    const uint8_t* full = shared + s % 2 * Stage::kBytes;
    uint8_t* next = shared + (s + 1) % 2 * Stage::kBytes;
    if (s + 1 < stages) rows.Next(next);
    if (s % 2 == 0) PrefetchSegment(w, s / 2 + kSegmentsAhead);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if ((warp < kWarps / 2) == (half == 0)) {
        if (s + 1 < stages) DecodeStage<Stage>(Weights{}, w, s + 1, book, next);
        continue;
      }
      switch (active) {
        case 1:
          tiles::MultiplyStage<Stage, 1>(full, start, part, acc);
          break;
        case 2:
          tiles::MultiplyStage<Stage, 2>(full, start, part, acc);
          break;
        case 3:
          tiles::MultiplyStage<Stage, 3>(full, start, part, acc);
          break;
        default:
          tiles::MultiplyStage<Stage, 4>(full, start, part, acc);
      }
    }
    if (s % 2 == 1 || s + 1 == stages) tiles::EndSegment(acc, total);
  }
  __syncthreads();
}

// What a launch works on: an expert's lists, or all rows with the shared expert.
struct TileParams {
  PanelMatrix first, second;    // gate and up, or down and nothing; `bytes` unused for routed ones
  int64_t first_at, second_at;  // inside an expert
  const uint64_t* experts;      // addresses, or words (expert_word.h); null: the shared expert
  Groups groups;
  const int32_t* first_tile;  // of the routed experts that are meant; null: the first of all
  const int32_t* end_tile;
  const int32_t* live;
  int32_t num_rows;
  int32_t num_active;
  QuantizedRows in;
  QuantizedRows out;     // of the first kernel: hidden values of entries in the groups' order
  float* sums;           // of the second: [entries, slice] by entry, the shared expert's behind
  int32_t shared_first;  // where the shared expert's entries begin, in both
  int32_t first_column;  // of the slice of columns; a multiple of kColumns
  int32_t slice;         // its columns
};

struct TileWork {
  const uint8_t* bytes;  // the expert; null for the shared one
  int first, count;      // entries
};

// The entries of a tile of up to `most`; count 0 if there are none.
__device__ __forceinline__ TileWork FindWork(const TileParams& p, int tile, int most) {
  if (p.experts == nullptr) {
    const int first = tile * most;
    return {nullptr, first, min(max(LiveRows(*p.live, p.num_rows) - first, 0), most)};
  }
  if (p.first_tile != nullptr) {
    tile += *p.first_tile;
    if (tile >= *p.end_tile) return {nullptr, 0, 0};
  }
  const ExpertTile t = p.groups.tiles[tile];  // together with their number
  if (tile >= *p.end_tile) return {nullptr, 0, 0};
  // Whoever computes an expert in windows, a tile reads it where it lies.
  const uint64_t address = p.experts[t.expert] & ~kTagBits;
  if (address == 0) return {nullptr, 0, 0};
  return {reinterpret_cast<const uint8_t*>(address), t.first, t.count};
}

// The block's 64 entries of a tile that may have more of them (Groups::tile_rows).
__device__ __forceinline__ TileWork FindPart(const TileParams& p) {
  TileWork work = FindWork(p, blockIdx.y, kTileRows);
  const int before = static_cast<int>(blockIdx.z) * kTileRows;
  work.first += before;
  work.count = min(max(work.count - before, 0), kTileRows);
  return work;
}

__device__ __forceinline__ void SetPanel(const PanelMatrix& m, const uint8_t* bytes, int panel,
                                         int at, WeightPanels* w) {
  w->bytes[at] = panel * 32 < m.rows ? bytes + panel * m.panel_bytes : nullptr;
  w->unit_bytes[at] = m.unit_bytes;
  w->type[at] = m.type;
}

template <typename Weights>
constexpr int64_t SharedBytes() {
  return 2 * tiles::Stage<Weights::kForm, kTileRows, kColumns>::kBytes +
         GridBytes(Weights::kBookType, BookCopies(Weights::kBookType));
}

// Quantises kHidden hidden values of `count` rows by kWarps warps, two rows a warp at once.
// hidden_of(row, i) -> values i to i + 3.
template <typename HiddenOf>
__device__ __forceinline__ void WriteHidden(const HiddenOf& hidden_of, const QuantizedRows& out,
                                            int64_t first, int count, int column) {
  constexpr int kTogether = 4;  // pairs: what one waits for the others hide
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int pair = static_cast<int>(threadIdx.x) / 32; 2 * pair < count;
       pair += kTogether * kWarps) {
    QuantizedQuad q[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = min(2 * (pair + i * kWarps) + lane / 16, count - 1);
      q[i] = QuantizeQuad(hidden_of(row, lane % 16 * 4));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = 2 * (pair + i * kWarps) + lane / 16;
      if (row >= count) continue;
      const int64_t value = (first + row) * out.values + column + lane % 16 * 4;
      *reinterpret_cast<uint32_t*>(out.codes + value) = q[i].codes;
      if (lane % 8 == 0) out.scales[value / 32] = q[i].scale;
      if (lane % 4 == 0) out.sums[value / 16] = __int2float_rn(q[i].half_sum);
    }
  }
}

// Hidden values of a tile: gate and up of 64 of them, the same thread's, so SiLU and quantisation
// follow without a way through memory.
template <typename Weights>
__global__ void __launch_bounds__(kThreads, 2) GateUpTiles(const __grid_constant__ TileParams p) {
  using Stage = tiles::Stage<Weights::kForm, kTileRows, kColumns>;
  STRATA_SHARED(uint8_t, shared);
  const TileWork work = FindPart(p);
  if (work.count == 0) return;
  const int panel = blockIdx.x * (kHidden / 32);
  WeightPanels w;
  w.cols = p.first.cols;
  const bool routed = p.experts != nullptr;
  for (int i = 0; i < 2; ++i) {
    SetPanel(p.first, routed ? work.bytes + p.first_at : p.first.bytes, panel + i, i, &w);
    SetPanel(p.second, routed ? work.bytes + p.second_at : p.second.bytes, panel + i, 2 + i, &w);
  }
  // Before anything that waits for memory: weights come the longest way.
  for (int segment = 0; segment < kSegmentsAhead; ++segment) PrefetchSegment(w, segment);
  const Rows book = StageBook<Weights, Stage>(shared);
  RowCopies<Stage> rows(p.in, work.count, [&](int i) -> int64_t {
    return routed ? p.groups.order[work.first + i] / p.num_active : work.first + i;
  });
  const tiles::WarpPart part(0, 8 * (static_cast<int>(threadIdx.x) / 32), kHidden);
  Sums total = {};
  MultiplyTile<Weights>(rows, work.count, w, book, part, shared, total);
  float* hidden = reinterpret_cast<float*>(shared);
  const bool exists = panel * 32 + part.column < p.first.rows;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = part.row + 16 * i + e / 2 * 8;
      hidden[row * kHidden + part.column + e % 2] =
          exists ? SiluMul(total[i][0][e], total[i][1][e]) : 0.0f;
    }
  }
  __syncthreads();
  const auto hidden_of = [&](int row, int i) {
    return *reinterpret_cast<const float4*>(hidden + row * kHidden + i);
  };
  WriteHidden(hidden_of, p.out, (routed ? 0 : p.shared_first) + work.first, work.count, panel * 32);
}

// The experts' rows of a slice of columns, not weighted.
template <typename Weights>
__global__ void __launch_bounds__(kThreads, 2) DownTiles(const __grid_constant__ TileParams p) {
  using Stage = tiles::Stage<Weights::kForm, kTileRows, kColumns>;
  STRATA_SHARED(uint8_t, shared);
  const TileWork work = FindPart(p);
  if (work.count == 0) return;
  const bool routed = p.experts != nullptr;
  const int column = p.first_column + blockIdx.x * kColumns;
  WeightPanels w;
  w.cols = p.first.cols;
  for (int i = 0; i < 4; ++i) {
    SetPanel(p.first, routed ? work.bytes + p.first_at : p.first.bytes, column / 32 + i, i, &w);
  }
  // Before anything that waits for memory: weights come the longest way.
  for (int segment = 0; segment < kSegmentsAhead; ++segment) PrefetchSegment(w, segment);
  const Rows book = StageBook<Weights, Stage>(shared);
  const int64_t entry = (routed ? 0 : p.shared_first) + work.first;
  RowCopies<Stage> rows(p.in, work.count, [&](int i) { return entry + i; });
  const tiles::WarpPart part(0, 16 * (static_cast<int>(threadIdx.x) / 32), 8);
  Sums total = {};
  MultiplyTile<Weights>(rows, work.count, w, book, part, shared, total);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = part.row + 16 * i + 8 * h;
      if (row >= work.count) continue;
      const int64_t to = routed ? p.groups.order[work.first + row] : entry + row;
      float* sums = p.sums + to * p.slice + blockIdx.x * kColumns + part.column;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (column + part.column + 8 * j >= p.first.rows) continue;
        *reinterpret_cast<float2*>(sums + 8 * j) =
            make_float2(total[i][j][2 * h], total[i][j][2 * h + 1]);
      }
    }
  }
}

}  // namespace strata::expert_tiles
