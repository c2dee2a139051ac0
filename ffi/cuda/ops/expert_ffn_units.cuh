// One warp's share of expert_ffn: a segment's weights in registers, asked for long before they are
// used, and its activations and the code book in shared memory.
#pragma once

#include "common/code_tables.h"
#include "cuda/activations.cuh"
#include "cuda/numerics.cuh"
#include "cuda/segments_body.cuh"

namespace strata {

// Two turns for a look-up, and two blocks fit every card.
inline constexpr int kBookCopies = 16;
// One turn, and an entry's lane is a constant away: for a block that has much shared memory to
// itself.
inline constexpr int kMostBookCopies = 32;

// Loads that stay where they are written: the compiler would move them behind a barrier.
__device__ __forceinline__ uint4 LoadNow(const uint4* address) {
#if defined(STRATA_EMULATE)
  return *address;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
#endif
}

__device__ __forceinline__ uint32_t LoadNow(const uint32_t* address) {
#if defined(STRATA_EMULATE)
  return *address;
#else
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
#endif
}

// Makes the compiler forget what it derived from a value, at no cost: it would keep that in
// registers all the while the weights need them.
__device__ __forceinline__ void Forget(int* value) {
#if !defined(STRATA_EMULATE)
  asm volatile("" : "+r"(*value));
#else
  (void)value;
#endif
}

// A lane's words kFirst to kFirst + kCount - 1 of a segment of kWords.
template <int kFirst, int kCount, int kWords>
struct PartWords {
  uint32_t words[kCount];

  __device__ __forceinline__ uint32_t operator[](int i) const { return words[i - kFirst]; }
  __device__ __forceinline__ void Load(const uint8_t* unit, int lane) {
    constexpr int kChunked = kWords / 4 * 4;
    constexpr int kEnd = kFirst + kCount < kChunked ? kFirst + kCount : kChunked;
    const uint4* chunks = reinterpret_cast<const uint4*>(unit) + lane;
#pragma unroll
    for (int i = kFirst; i < kEnd; i += 4) {
      const uint4 chunk = LoadNow(chunks + i / 4 * 32);
      words[i - kFirst] = chunk.x;
      words[i - kFirst + 1] = chunk.y;
      words[i - kFirst + 2] = chunk.z;
      words[i - kFirst + 3] = chunk.w;
    }
    const uint32_t* rest = reinterpret_cast<const uint32_t*>(unit + kChunked * 128) + lane;
#pragma unroll
    for (int i = kChunked; i < kFirst + kCount; ++i) {
      words[i - kFirst] = LoadNow(rest + (i - kChunked) * 32);
    }
  }
};

// A segment of kBlocks blocks of 32; Q8_0, whose words are too many for one warp's registers where
// twenty warps share a processor, comes in two halves.
template <typename Decode, int kBlocks>
struct Unit {
  static constexpr int kWords = SegmentWords<Decode>(kBlocks);
  static constexpr int kParts = kWords > 56 ? 2 : 1;
  static constexpr int kPartBlocks = kBlocks / kParts;
  static constexpr int kSecond = kWords / 2 / 4 * 4;  // first word of the second half
  static constexpr int kCount = kParts == 1 ? kWords : kWords - kSecond;
  static constexpr int kPartBytes = kCount * 128;  // of all lanes: they lie together
  static constexpr int kSecondAt = kParts == 1 ? 0 : kSecond * 128;
  static_assert(kParts == 1 || kInfo<Decode>.block_values == 32);
  using First = PartWords<0, kCount, kWords>;
  using Second = PartWords<kSecond, kCount, kWords>;

  template <int kPart, typename Raw>
  __device__ __forceinline__ static float Add(const Raw& raw, const Rows& rows, int lane,
                                              float sum) {
    const auto book = BookOf<Decode>(rows, lane);
    const int row[1] = {0};
    float acc[1] = {sum};
#pragma unroll
    for (int b = kPart * kPartBlocks; b < (kPart + 1) * kPartBlocks; ++b) {
      BlockDot<Decode, 1>(raw, book, rows, row, 0, b, acc);
    }
    return acc[0];
  }

  // The segment's sum, from a first part that has been asked for.
  __device__ __forceinline__ static float Sum(const First& first, const uint8_t* unit,
                                              const Rows& rows, int lane) {
    float sum = Add<0>(first, rows, lane, 0.0f);
    if constexpr (kParts == 2) {
      Second second;
      second.Load(unit, lane);
      sum = Add<1>(second, rows, lane, sum);
    }
    return sum;
  }
};

// The activations of one warp's segment.
struct SegmentStage {
  int8_t codes[256];
  float scales[8];
  int16_t sums[16];
};

__device__ __forceinline__ Rows RowsOf(const SegmentStage& stage, const unsigned char* book,
                                       int copies) {
  return {stage.codes, stage.scales, stage.sums,
          nullptr,     256,          reinterpret_cast<const uint32_t*>(book),
          copies};
}

// 256 values, four a lane of each half.
__device__ __forceinline__ void QuantizeSegment(const float4 (&x)[2], int lane,
                                                SegmentStage* stage) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const QuantizedQuad quad = QuantizeQuad(x[half]);
    reinterpret_cast<uint32_t*>(InShared(stage->codes))[half * 32 + lane] = quad.codes;
    if (lane % 8 == 0) InShared(stage->scales)[half * 4 + lane / 8] = quad.scale;
    if (lane % 4 == 0) {
      InShared(stage->sums)[half * 8 + lane / 4] = static_cast<int16_t>(quad.half_sum);
    }
  }
  __syncwarp();
}

// IQ3_S: the numbers of the levels, as its decoder wants them.
inline constexpr int8_t kIq3SNumbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static __device__ const auto kIq3SBook = SpreadGrid<uint32_t>(kIq3SPacked, kIq3SNumbers, 1, 0);
static __device__ const auto kIq3XxsBook = kIq3XxsGrid;

// Writes the code book by the whole block; the caller synchronises.
template <typename Decode, int kCopies>
__device__ __forceinline__ void StageBook(unsigned char* book) {
  constexpr int kEntries = GridEntries(Decode::kType);
  static_assert(GridEntryWords(Decode::kType) == 1);
  constexpr int kChunks = kCopies / 4;  // of 16 bytes, of one entry's copies
  const uint32_t* source =
      Decode::kType == GgmlType::kIQ3_S ? kIq3SBook.entries : kIq3XxsBook.entries;
  int entry = threadIdx.x;
  Forget(&entry);
#pragma unroll 2
  for (; entry < kEntries; entry += blockDim.x) {
    const uint32_t word = source[entry];
    uint4* to = reinterpret_cast<uint4*>(InShared(book)) + entry * kChunks;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      // Neighbours begin at different chunks, because entries lie in the same banks.
      to[(i + entry * kChunks / 8) % kChunks] = make_uint4(word, word, word, word);
    }
  }
}

}  // namespace strata
