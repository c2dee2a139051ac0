// How the kernels of expert_ffn_tiles.cuh get their weights: a stage (128 values of 128 rows) from
// its panels to codes and factors in shared memory.
#pragma once

#include "cuda/ops/expert_groups.h"
#include "cuda/products.cuh"
#include "cuda/tile_products.cuh"

namespace strata::expert_tiles {

using tiles::BookCopies;
using tiles::kSegmentsAhead;

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kColumns = 128;  // weight rows of a block
inline constexpr int kGroups = kTileRows / 16;
inline constexpr int kHidden = kColumns / 2;  // hidden values of a block of the first kernel

// Weights of one type, its decoder inlined.
template <typename Decode>
struct Inlined {
  static constexpr Form kForm = Decode::kForm;
  static constexpr GgmlType kBookType = Decode::kType;
};

// Weights of any type by calls, all in the widest form: k = 1, n = 0 or 1 and M = 0 where a type
// has none give the same sums.
struct AnyType {
  static constexpr Form kForm = Form::kSplitMin;
  static constexpr GgmlType kBookType = GgmlType::kF32;  // none is staged
};

// Four panels, some of which may be missing.
struct WeightPanels {
  const uint8_t* bytes[4];  // null: missing
  int32_t unit_bytes[4];
  GgmlType type[4];
  int32_t cols;
};

template <typename Stage>
__device__ __forceinline__ void StoreWeights(const uint32_t (&words)[8],
                                             const tiles::BlockFactors& f, int column, int b,
                                             uint8_t* stage) {
  uint8_t* codes = stage + Stage::kCodes;
  *reinterpret_cast<uint4*>(codes + SwizzledAt(column, 2 * b)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  *reinterpret_cast<uint4*>(codes + SwizzledAt(column, 2 * b + 1)) =
      make_uint4(words[4], words[5], words[6], words[7]);
  const int at = (b * kColumns + column) * 4;
  *reinterpret_cast<float*>(stage + Stage::kScales + at) = f.d;
  if constexpr (tiles::HasMinimum(Stage::kOf)) {
    *reinterpret_cast<float*>(stage + Stage::kMinimums + at) = f.m;
  }
  if constexpr (tiles::IsSplit(Stage::kOf)) {
    uint32_t* factors = reinterpret_cast<uint32_t*>(stage + Stage::kFactors);
    factors[2 * b * kColumns + column] = f.factors[0];
    factors[(2 * b + 1) * kColumns + column] = f.factors[1];
  }
}

// Block `b` of 32 values of a unit's rows, a row a lane.
template <typename Decode, typename Stage, typename Raw, typename Book>
__device__ __forceinline__ void DecodeBlock(const Raw& raw, const Book& book, int b, int column,
                                            int stage_block, uint8_t* stage) {
  uint32_t words[8];
  tiles::WeightWords<Decode>(raw, b, book, words);
  tiles::BlockFactors f = tiles::LoadFactors<Decode>(raw, b);
  if constexpr (Stage::kOf == Form::kSplitMin && !tiles::IsSplit(Decode::kForm)) {
    const int n = tiles::HasMinimum(Decode::kForm) ? 1 : 0;
    f.factors[0] = f.factors[1] = tiles::PackFactors(1, n);
  }
  StoreWeights<Stage>(words, f, column, stage_block, stage);
}

template <typename Decode, typename Stage>
__device__ __noinline__ void DecodeByCall(const uint8_t* unit, int lane, int blocks, int b,
                                          int column, uint8_t* stage) {
  const PanelWords raw = {unit, lane, SegmentWords<Decode>(blocks) / 4 * 4};
  DecodeBlock<Decode, Stage>(raw, tiles::GlobalBook{BookWords(Decode::kType)}, b, column, b % 4,
                             InShared(stage));
}

template <typename Stage>
__device__ __forceinline__ void DecodeUnit(GgmlType type, const uint8_t* unit, int blocks, int b,
                                           int column, uint8_t* stage) {
  const int lane = threadIdx.x % 32;
  switch (type) {
#define STRATA_CASE(name) \
  case GgmlType::k##name: \
    return DecodeByCall<Decode##name, Stage>(unit, lane, blocks, b, column, stage);
    STRATA_QUANTISED_TYPES(STRATA_CASE)
#undef STRATA_CASE
    default:
      return;
  }
}

// Blocks kFirst and kFirst + 1 of a segment of kBlocks: all numbers known, so the loads are whole
// chunks of 16 bytes, of those that the two blocks need, and all on their way together.
template <typename Decode, typename Stage, int kBlocks, int kFirst>
__device__ __forceinline__ void DecodePair(const uint8_t* unit, int column, const Rows& book,
                                           uint8_t* stage) {
  if constexpr (kFirst < kBlocks) {
    const int lane = threadIdx.x % 32;
    RawWords<SegmentWords<Decode>(kBlocks)> raw;
    LoadWords(unit, lane, &raw);
    const auto own = BookOf<Decode>(book, lane);
    DecodeBlock<Decode, Stage>(raw, own, kFirst, column, kFirst % 4, stage);
    DecodeBlock<Decode, Stage>(raw, own, kFirst + 1, column, kFirst % 4 + 1, stage);
  }
}

template <typename Decode, typename Stage, int kBlocks>
__device__ __forceinline__ void DecodePairOf(int first, const uint8_t* unit, int column,
                                             const Rows& book, uint8_t* stage) {
  switch (first) {
    case 0:
      return DecodePair<Decode, Stage, kBlocks, 0>(unit, column, book, stage);
    case 2:
      return DecodePair<Decode, Stage, kBlocks, 2>(unit, column, book, stage);
    case 4:
      return DecodePair<Decode, Stage, kBlocks, 4>(unit, column, book, stage);
    default:
      return DecodePair<Decode, Stage, kBlocks, 6>(unit, column, book, stage);
  }
}

// The warp's share of stage `number`: two blocks of one of four panels. Blocks behind the rows' end
// have codes and scales of 0.
struct DecodeWork {
  const uint8_t* unit;  // null: no panel
  GgmlType type;
  int column, blocks, first;

  __device__ __forceinline__ DecodeWork(const WeightPanels& w, int number) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int panel = warp % 4;
    const int segment = number / 2;
    unit = w.bytes[panel] == nullptr
               ? nullptr
               : w.bytes[panel] + static_cast<int64_t>(segment) * w.unit_bytes[panel];
    type = w.type[panel];
    column = panel * 32 + static_cast<int>(threadIdx.x) % 32;
    blocks = min(8, w.cols / 32 - segment * 8);
    first = number % 2 * 4 + warp / 4 * 2;
  }
};

template <typename Stage>
__device__ __forceinline__ void DecodeStage(AnyType, const WeightPanels& w, int number, const Rows&,
                                            uint8_t* stage) {
  const DecodeWork work(w, number);
  if (work.unit == nullptr) return;
#pragma unroll 1
  for (int b = work.first; b < work.first + 2; ++b) {
    if (b < work.blocks) {
      DecodeUnit<Stage>(work.type, work.unit, work.blocks, b, work.column, stage);
    } else {
      StoreWeights<Stage>({}, {}, work.column, b % 4, stage);
    }
  }
}

// Rows end in a whole segment or, as those of 640 values, in half of one; other ends take the way
// of AnyType.
template <typename Stage, typename Decode>
__device__ __forceinline__ void DecodeStage(Inlined<Decode>, const WeightPanels& w, int number,
                                            const Rows& book, uint8_t* stage) {
  const DecodeWork work(w, number);
  if (work.unit == nullptr) return;
  constexpr bool kWhole = kInfo<Decode>.block_values == 256;
  if (kWhole || work.blocks == 8) {
    DecodePairOf<Decode, Stage, 8>(work.first, work.unit, work.column, book, stage);
  } else if (work.blocks == 4) {
    if constexpr (!kWhole) {
      DecodePairOf<Decode, Stage, 4>(work.first, work.unit, work.column, book, stage);
    }
  } else {
#pragma unroll 1
    for (int b = work.first; b < work.first + 2; ++b) {
      if (b < work.blocks) {
        DecodeByCall<Decode, Stage>(work.unit, threadIdx.x % 32, work.blocks, b, work.column,
                                    stage);
      } else {
        StoreWeights<Stage>({}, {}, work.column, b % 4, stage);
      }
    }
  }
}

// Asks for the panels' units of a segment, a panel a warp: into the L2 cache, ahead of their use.
__device__ __forceinline__ void PrefetchSegment(const WeightPanels& w, int segment) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= 4 || segment * 256 >= w.cols || w.bytes[warp] == nullptr) return;
  const int blocks = min(8, w.cols / 32 - segment * 8);
  PrefetchUnit(w.bytes[warp] + static_cast<int64_t>(segment) * w.unit_bytes[warp],
               w.unit_bytes[warp] / 8 * blocks, static_cast<int>(threadIdx.x) % 32);
}

// The code book behind the two stages.
template <typename Weights, typename Stage>
__device__ __forceinline__ Rows StageBook(uint8_t* shared) {
  constexpr GgmlType kType = Weights::kBookType;
  Rows book = {};
  if constexpr (GridEntries(kType) > 0) {
    uint32_t* at = reinterpret_cast<uint32_t*>(shared + 2 * Stage::kBytes);
    book.grid = at;
    book.grid_copies = BookCopies(kType);
    StageGrid(kType, BookCopies(kType), at, threadIdx.x, blockDim.x);
  }
  return book;
}

}  // namespace strata::expert_tiles
