// Wide tiles: products of up to 160 activation rows with 128 weight rows, for chips whose matrix
// units work on their own (group_mma.cuh). This half fills stages: 128 values of the rows and of
// the weights, codes and what scales their products.
//
// Weights are decoded where they are multiplied, once for all rows of a tile.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/barriers.cuh"
#include "cuda/code_books.cuh"
#include "cuda/group_mma.cuh"
#include "cuda/products.cuh"
#include "cuda/tile_products.cuh"
#include "cuda/tile_rows.h"

namespace strata::wide {

using tiles::BookCopies;
using tiles::kSegmentsAhead;
using tiles::kStageValues;
using tiles::QuantizedRows;

inline constexpr int kMostRows = 160;
inline constexpr int kColumns = 128;  // weight rows

// Two groups of four warps multiply; two fill stages, in turn: what one of them waits for is hidden
// behind the other's work.
inline constexpr int kThreads = 512;
inline constexpr int kMultiplying = 256;
inline constexpr int kFilling = 128;  // threads that fill a stage

// Where things lie in a stage.
template <Form kForm>
struct Stage {
  static constexpr bool kHasMinimum = tiles::HasMinimum(kForm);
  static constexpr int kBlocks = tiles::kStageBlocks;
  // Rows' scales of one block, and 8 more: those of a row's four blocks lie in four banks.
  static constexpr int kScaleLine = kMostRows + 8;
  static constexpr int kWeights = 0;                                   // [column] swizzled codes
  static constexpr int kRows = kColumns * 128;                         // [row] likewise
  static constexpr int kScales = kRows + kMostRows * 128;              // [block][column] float: D
  static constexpr int kRowScales = kScales + kBlocks * kColumns * 4;  // [block][row] float
  static constexpr int kMinimums = kRowScales + kBlocks * kScaleLine * 4;  // as D: M
  static constexpr int kRowSums =                                          // [block][row] float2
      kMinimums + (kHasMinimum ? kBlocks * kColumns * 4 : 0);
  static constexpr int kEnd = kRowSums + (kHasMinimum ? kBlocks * kScaleLine * 8 : 0);
  static constexpr int kBytes = (kEnd + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  static constexpr int kPlaces = kHasMinimum ? 2 : 3;  // as many as there is room for
};

// The block's shared memory: stages, the sums of whole segments, barriers, the code book.
template <typename Decode>
struct Layout {
  using Stage = wide::Stage<Decode::kForm>;
  static constexpr int kPlaces = Stage::kPlaces;
  // Floats from one activation row's sums to the next: a warp's rows and columns meet all banks.
  static constexpr int kLine = kColumns + 4;
  static constexpr int kTotals = kPlaces * Stage::kBytes;
  static constexpr int kBarriers = kTotals + kMostRows * kLine * 4;
  static constexpr int kBook = kBarriers + 128;
  static constexpr int kCopies = BookCopies(Decode::kType);
  static constexpr int kBytes = kBook + GridBytes(Decode::kType, kCopies);

  __device__ static Barrier* Full(uint8_t* shared) {
    return reinterpret_cast<Barrier*>(shared + kBarriers);
  }
  __device__ static Barrier* Empty(uint8_t* shared) { return Full(shared) + kPlaces; }
  __device__ static Barrier* Met(uint8_t* shared) { return Full(shared) + 2 * kPlaces; }
  static_assert((2 * kPlaces + 1) * sizeof(Barrier) <= 128);
};

#if STRATA_GROUPS

// The block's barriers and code book.
template <typename Decode>
__device__ __forceinline__ void Prepare(uint8_t* shared) {
  using Layout = wide::Layout<Decode>;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < Layout::kPlaces; ++i) {
      InitBarrier(Layout::Full(shared) + i, kFilling);
      InitBarrier(Layout::Empty(shared) + i, kMultiplying);
    }
    InitBarrier(Layout::Met(shared), kMultiplying);
  }
  if constexpr (GridEntries(Decode::kType) > 0) {
    constexpr int kWords = GridEntryWords(Decode::kType), kEntry = kWords * Layout::kCopies;
    uint32_t* book = reinterpret_cast<uint32_t*>(shared + Layout::kBook);
    for (int i = thread; i < GridEntries(Decode::kType) * kEntry; i += kThreads) {
      book[i] = books::Words(Decode::kType)[i / kEntry * kWords + i % kWords];
    }
  }
  __syncthreads();
}

// The thread's number in its group, as if not known before: what follows from it is computed where
// it is needed and not kept in registers, of which there are few.
__device__ __forceinline__ int FillingThread() {
  int thread = static_cast<int>(threadIdx.x) % kFilling;
#if !defined(STRATA_EMULATE)
  asm volatile("" : "+r"(thread));
#endif
  return thread;
}

// A filling thread's share of the activation rows: in every 16th row a chunk of 16 codes and a
// block's scale, or the sums of its codes.
template <typename Stage>
struct RowCopies {
  static constexpr int kStep = kFilling / 8;
  static constexpr int kNumber = kMostRows / kStep;
  static_assert(kMostRows % kStep == 0 && kStep % 8 == 0);

  const QuantizedRows& x;
  int count;
  int32_t values[kNumber];  // where the rows begin in x

  // row_of(i) -> the activation row of the tile's i-th entry.
  template <typename RowOf>
  __device__ __forceinline__ RowCopies(const QuantizedRows& in, int num_rows, const RowOf& row_of)
      : x(in), count(num_rows) {
    const int first = FillingThread() / 8;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const int row = first + i * kStep;
      values[i] = row < count ? static_cast<int32_t>(row_of(row) * x.values) : 0;
    }
  }

  // Asks for stage `number`.
  __device__ __forceinline__ void Copy(int number, uint8_t* stage) const {
    const int thread = FillingThread();
    const int first = thread / 8, chunk = thread % 8, b = chunk % 4;
    uint8_t* codes = stage + Stage::kRows + SwizzledAt(first, chunk);
    uint8_t* scales = stage + Stage::kRowScales + (b * Stage::kScaleLine + first) * 4;
    uint8_t* sums = stage + Stage::kRowSums + (b * Stage::kScaleLine + first) * 8;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      if (first + i * kStep >= count) continue;
      const int32_t value = values[i] + number * kStageValues;
      CopyBytesAsync<16>(codes + i * kStep * 128,
                         reinterpret_cast<const uint8_t*>(x.codes) + value + chunk * 16);
      const uint32_t block = static_cast<uint32_t>(value) / 32 + b;
      if (chunk < 4) {
        CopyBytesAsync<4>(scales + i * kStep * 4,
                          reinterpret_cast<const uint8_t*>(x.scales + block));
      } else if (Stage::kHasMinimum) {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(x.sums + 2 * block);
        CopyBytesAsync<4>(sums + i * kStep * 8, from);
        CopyBytesAsync<4>(sums + i * kStep * 8 + 4, from + 4);
      }
    }
  }
};

// Block kBlock of a segment, a weight row a lane.
template <typename Decode, int kBlock, typename Raw, typename Book>
__device__ __forceinline__ void DecodeBlock(const Raw& raw, const Book& book, int column,
                                            uint8_t* stage) {
  using Stage = wide::Stage<Decode::kForm>;
  constexpr int kAt = kBlock % Stage::kBlocks;
  uint32_t words[8];
  tiles::WeightWords<Decode>(raw, kBlock, book, words);
  const tiles::BlockFactors f = tiles::LoadFactors<Decode>(raw, kBlock);
  uint8_t* codes = stage + Stage::kWeights;
  *reinterpret_cast<uint4*>(codes + SwizzledAt(column, 2 * kAt)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  *reinterpret_cast<uint4*>(codes + SwizzledAt(column, 2 * kAt + 1)) =
      make_uint4(words[4], words[5], words[6], words[7]);
  const int at = (kAt * kColumns + column) * 4;
  *reinterpret_cast<float*>(stage + Stage::kScales + at) = f.d;
  if constexpr (Stage::kHasMinimum) {
    *reinterpret_cast<float*>(stage + Stage::kMinimums + at) = f.m;
  }
}

// A panel of a matrix; in place of one behind the last the first, whose sums are not used then.
struct Panel {
  const uint8_t* bytes;
  int unit_bytes;

  __device__ __forceinline__ Panel(const PanelMatrix& m, const uint8_t* matrix, int number)
      : bytes(matrix + (number * 32 < m.rows ? number * m.panel_bytes : 0)),
        unit_bytes(m.unit_bytes) {}
};

// The filling threads of group kGroup, which take the first halves of all segments or the second.
template <typename Decode, int kGroup>
struct Filler {
  using Layout = wide::Layout<Decode>;
  using Stage = typename Layout::Stage;

  static_assert(!tiles::IsSplit(Decode::kForm), "a stage has no factors of half blocks");
  // A parity tells a barrier's phase from the one before, not from the one before that. Before
  // stage n a group waits for the end of stage n - kPlaces in the same place; the place's barrier
  // must be past stage n - 2 kPlaces by then. Stages end in order, and for its last stage, n - g,
  // the group has seen n - g - kPlaces end: enough where g <= kPlaces. Groups take turns, so g is
  // 2; between tiles of an odd number of stages it is 1 for the first group, but 3 for the second.
  // Tiles of types whose blocks are segments have even numbers.
  static_assert(Layout::kPlaces >= 3 || kInfo<Decode>.block_values == 256);

  uint8_t* shared;
  RingPlace<Layout::kPlaces> at = {};  // of the next stage, whichever group fills it

  // Stage `number` of a tile, half kHalf of a segment of kBlocks blocks in `unit`.
  template <int kBlocks, int kHalf>
  __device__ __forceinline__ void Fill(const uint8_t* unit, int number,
                                       const RowCopies<Stage>& rows) const {
    const int thread = FillingThread();
    const int lane = thread % 32;
    Rows book = {};
    book.grid = reinterpret_cast<const uint32_t*>(shared + Layout::kBook);
    book.grid_copies = Layout::kCopies;
    const auto own = BookOf<Decode>(book, lane);
    RawWords<SegmentWords<Decode>(kBlocks)> raw;
    LoadWords(unit, lane, &raw);
    AwaitPhase(Layout::Empty(shared) + at.place, at.parity ^ 1);
    uint8_t* stage = shared + at.place * Stage::kBytes;
    rows.Copy(number, stage);
    DecodeBlock<Decode, 4 * kHalf>(raw, own, thread, stage);
    DecodeBlock<Decode, 4 * kHalf + 1>(raw, own, thread, stage);
    DecodeBlock<Decode, 4 * kHalf + 2>(raw, own, thread, stage);
    DecodeBlock<Decode, 4 * kHalf + 3>(raw, own, thread, stage);
    WaitForCopies();
    PublishToUnits();
    ArriveAt(Layout::Full(shared) + at.place);
  }

  // A tile of rows of `cols` values with the warp's panel.
  __device__ __forceinline__ void FillTile(const Panel& panel, int cols,
                                           const RowCopies<Stage>& rows) {
    const int segments = cols / 256;
    const uint8_t* unit = panel.bytes;
#pragma unroll 1
    for (int s = 0; s < segments; ++s) {
      if (kGroup == 0 && s + kSegmentsAhead < segments) {
        PrefetchUnit(unit + kSegmentsAhead * panel.unit_bytes, panel.unit_bytes,
                     static_cast<int>(threadIdx.x) % 32);
      }
      if constexpr (kGroup == 0) Fill<8, 0>(unit, 2 * s, rows);
      at.Next();
      if constexpr (kGroup == 1) Fill<8, 1>(unit, 2 * s + 1, rows);
      at.Next();
      unit += panel.unit_bytes;
    }
    if constexpr (kInfo<Decode>.block_values != 256) {
      if (cols % 256 == 0) return;
      if constexpr (kGroup == 0) Fill<4, 0>(unit, 2 * segments, rows);
      at.Next();
    }
  }
};

#endif  // STRATA_GROUPS

}  // namespace strata::wide
