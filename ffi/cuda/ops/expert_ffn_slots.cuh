// Weights of expert_ffn on their way through shared memory: a warp's slot, whose bytes are asked
// for as soon as those before are in its registers.
#pragma once

#include <algorithm>

#include "cuda/async_copy.cuh"
#include "cuda/ops/expert_ffn_units.cuh"

namespace strata {

// A lane's copy of a code book of 4-byte entries, each kMostBookCopies times side by side, by its
// address in shared memory: an entry is one multiplication and one load away.
struct LaneBook {
#if defined(STRATA_EMULATE)
  const unsigned char* first;
#else
  uint32_t first;
#endif

  __device__ __forceinline__ LaneBook(const unsigned char* book, int lane) {
#if defined(STRATA_EMULATE)
    first = book + 4 * lane;
#else
    first = static_cast<uint32_t>(__cvta_generic_to_shared(book)) + 4 * lane;
#endif
  }
  __device__ __forceinline__ uint32_t Word(uint32_t index) const {
#if defined(STRATA_EMULATE)
    return *reinterpret_cast<const uint32_t*>(first + index * (4 * kMostBookCopies));
#else
    // Not volatile: the book stands still, and the compiler may load early.
    uint32_t word;
    asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(first + index * (4 * kMostBookCopies)));
    return word;
#endif
  }
};

template <typename Decode>
__device__ __forceinline__ auto LaneBookOf(const unsigned char* book, int lane) {
  if constexpr (GridEntries(Decode::kType) == 0) {
    return NoBook{};
  } else {
    return LaneBook(book, lane);
  }
}

// Part kPart of a segment (Unit), of which a lane has these words.
template <typename Decode, int kBlocks, int kPart>
struct PartView {
  using Whole = Unit<Decode, kBlocks>;
  const RawWords<Whole::kCount>& raw;

  __device__ __forceinline__ uint32_t operator[](int i) const {
    return raw.words[i - kPart * Whole::kSecond];
  }
};

// acc + the terms of a part's blocks for kRows activation rows.
template <typename Decode, int kBlocks, int kPart, int kRows, typename Book>
__device__ __forceinline__ void AddPart(const RawWords<Unit<Decode, kBlocks>::kCount>& raw,
                                        const Book& book, const Rows& rows, const int (&row)[kRows],
                                        int first_block, float (&acc)[kRows]) {
  using Whole = Unit<Decode, kBlocks>;
  const PartView<Decode, kBlocks, kPart> view = {raw};
#pragma unroll
  for (int b = kPart * Whole::kPartBlocks; b < (kPart + 1) * Whole::kPartBlocks; ++b) {
    BlockDot<Decode, kRows>(view, book, rows, row, first_block, b, acc);
  }
}

// Asks for the first part of a segment of 8 blocks or, not `whole`, of 4: for the unit that lane
// `source` names. `linked`: it lies in the host's memory.
template <typename Decode, typename AnySlot>
__device__ __forceinline__ void AskFor(AnySlot* slot, const uint8_t* unit, bool whole, bool linked,
                                       int lane, int source = 0) {
  constexpr int kLong = Unit<Decode, 8>::kPartBytes, kShort = Unit<Decode, 4>::kPartBytes;
  if (linked) {
    whole ? slot->template AskByLanes<kLong>(unit, lane, source)
          : slot->template AskByLanes<kShort>(unit, lane, source);
  } else {
    whole ? slot->template Ask<kLong>(unit, lane, source)
          : slot->template Ask<kShort>(unit, lane, source);
  }
}

// A segment's sum for one row, from a slot whose first part has been asked for; `unit` matters only
// where there is a second. `next` runs when the slot is free for other bytes.
template <typename Decode, int kBlocks, typename AnySlot, typename Book, typename Next>
__device__ __forceinline__ float SlotSum(AnySlot* slot, const uint8_t* unit, const Book& book,
                                         const Rows& rows, int row, int first_block, bool linked,
                                         int lane, const Next& next) {
  using Whole = Unit<Decode, kBlocks>;
  RawWords<Whole::kCount> raw;
  const int one[1] = {row};
  float acc[1] = {0.0f};
  slot->Wait();
  slot->Take(lane, &raw);
  if constexpr (Whole::kParts == 2) {
    AskFor<Decode>(slot, unit + Whole::kSecondAt, true, linked, lane);
    AddPart<Decode, kBlocks, 0, 1>(raw, book, rows, one, first_block, acc);
    slot->Wait();
    slot->Take(lane, &raw);
    next();
    AddPart<Decode, kBlocks, 1, 1>(raw, book, rows, one, first_block, acc);
  } else {
    next();
    AddPart<Decode, kBlocks, 0, 1>(raw, book, rows, one, first_block, acc);
  }
  return acc[0];
}

// Part kPart of a segment for kRows rows from `first` on (after the last that one again), whose
// sums so far lie `stride` apart.
template <typename Decode, int kPart, int kRows>
__device__ __forceinline__ void AddPartTo(const RawWords<Unit<Decode, 8>::kCount>& raw,
                                          const Rows& rows, int first, int num_rows,
                                          int first_block, float* to, int stride) {
  int row[kRows];
  float acc[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = kRows == 1 ? first : min(first + r, num_rows - 1);
    acc[r] = kPart == 0 ? 0.0f : to[row[r] * stride];
  }
  AddPart<Decode, 8, kPart, kRows>(raw, NoBook{}, rows, row, first_block, acc);
#pragma unroll
  for (int r = 0; r < kRows; ++r) to[row[r] * stride] = acc[r];
}

// The same for all rows, in passes of four.
template <typename Decode, int kPart>
__device__ __forceinline__ void AddPartToAll(RawWords<Unit<Decode, 8>::kCount>* raw,
                                             const Rows& rows, int num_rows, int first_block,
                                             float* to, int stride) {
  if (num_rows == 1) {
    return AddPartTo<Decode, kPart, 1>(*raw, rows, 0, 1, first_block, to, stride);
  }
#pragma unroll 1
  for (int first = 0; first < num_rows; first += 4) {
    Forget(raw);
    AddPartTo<Decode, kPart, 4>(*raw, rows, first, num_rows, first_block, to, stride);
  }
}

}  // namespace strata
