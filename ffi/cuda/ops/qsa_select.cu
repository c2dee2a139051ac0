#include <algorithm>

#include "cuda/ops/qsa_parts.cuh"
#include "cuda/ops/qsa_select.h"
#include "cuda/ops/qsa_select_parts.cuh"
#include "cuda/ops/qsa_select_tiles.h"

namespace strata {
namespace {

constexpr int kGroup = kIndexGroup;

// Rows whose scores there is room for at once: of a window all, of a tile as many as fit.
constexpr int64_t kRowsAtOnce = 64;
constexpr int64_t kTileScores = 128 << 20;  // bytes

// Scoring: a warp takes half a group, two lanes for every channel, four blocks a lane.
constexpr int kScoreThreads = 256;
constexpr int kWarpBlocks = kGroup / 2;
constexpr int kScoreBlocks = kScoreThreads / 32 * kWarpBlocks;
constexpr int kScoreRows = 8;  // rows that share their keys through the L1 cache
constexpr int kHeads = 4;      // heads at a time
constexpr int kSteps = 8;      // loads of a lane that are under way at once

// Selecting: a score is at least +0, so its 31 bits order like the number; digits of 11, 10 and 10.
constexpr int kSelectThreads = 1024;
constexpr int kWarps = kSelectThreads / 32;
constexpr int kBins = 1 << 11;
constexpr int kBatch = 8;  // scores of a lane that are under way at once

// The sum over heads of max(q_h . key, 0) for the warp's eight blocks; lane 2 b + q < 8 gets that
// of block 4 q + b. `keys` is the lane's four blocks of channel 0.
__device__ float Score(const QsaSelectArgs& a, const float* q, const float* keys, int lane) {
  float score = 0.0f;
  for (int head = 0; head < a.index_heads; head += kHeads) {
    float x[16] = {};  // [kHeads][4 blocks]
    for (int begin = lane / 2; begin < a.index_dim; begin += 16 * kSteps) {
      float4 key[kSteps];
      float query[kSteps][kHeads];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int channel = begin + 16 * s;
        const bool inside = channel < a.index_dim;
        key[s] = inside ? __ldg(reinterpret_cast<const float4*>(keys + channel * kGroup))
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          query[s][h] = inside && head + h < a.index_heads
                            ? __ldg(q + (head + h) * a.index_dim + channel)
                            : 0.0f;
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          x[4 * h + 0] = __fmaf_rn(query[s][h], key[s].x, x[4 * h + 0]);
          x[4 * h + 1] = __fmaf_rn(query[s][h], key[s].y, x[4 * h + 1]);
          x[4 * h + 2] = __fmaf_rn(query[s][h], key[s].z, x[4 * h + 2]);
          x[4 * h + 3] = __fmaf_rn(query[s][h], key[s].w, x[4 * h + 3]);
        }
      }
    }
    // Over the 16 lanes of a channel each; head and block go into the lane's upper bits.
    Halve<8>(x, lane, 16);
    Halve<4>(x, lane, 8);
    Halve<2>(x, lane, 4);
    Halve<1>(x, lane, 2);
    float sum = x[0] > 0.0f ? x[0] : 0.0f;  // a NaN counts as nothing
    sum += __shfl_xor_sync(kAllLanes, sum, 8);
    sum += __shfl_xor_sync(kAllLanes, sum, 16);
    score += sum;
  }
  return score + 0.0f;
}

__global__ void __launch_bounds__(kScoreThreads)
    ScoreKernel(const __grid_constant__ QsaSelectArgs a, int first_row, int num_rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x * kScoreBlocks + warp * kWarpBlocks;  // the warp's first
  const int begin = blockIdx.y * kScoreRows;
  const int live = LiveRows(*a.live, a.num_rows), pos = *a.pos;
  const int end = min(min(begin + kScoreRows, num_rows), live - first_row);
  const int capacity = a.num_groups * kGroup;
  const float* keys = a.index_keys + static_cast<int64_t>(block / kGroup) * a.index_dim * kGroup +
                      block % kGroup + 4 * (lane % 2);
  // Both numbers are waited for at once, and most of a long cache's thread blocks end here.
  const int last = CompleteBlocks(a, pos, first_row + end - 1);
  if ((end <= begin) | (last <= a.num_blocks) | (block >= last)) return;
  for (int row = begin; row < end; ++row) {
    const int t = first_row + row;
    const int complete = CompleteBlocks(a, pos, t);
    if (complete <= a.num_blocks || block >= complete) continue;
    const float* q = a.index_q + static_cast<int64_t>(t) * a.index_heads * a.index_dim;
    const float score = Score(a, q, keys, lane);
    if (lane < kWarpBlocks) {
      const int64_t place = static_cast<int64_t>(row) * capacity + block;
      a.scores[place + lane % 2 * 4 + lane / 2] = __float_as_uint(score);
    }
  }
}

// Which scores are chosen, by their bits: score >> shift above `digits` all, equal to it the first
// `wanted`.
struct Cut {
  uint32_t digits;
  int shift;
  int wanted;
};

// A warp's share of a row's scores, whole batches; the last warps' may be empty.
struct Share {
  const uint32_t* scores;
  int begin;
  int end;
};

// Calls use(index, score, inside) for the share in ascending batches of 32, all lanes together.
template <typename Use>
__device__ __forceinline__ void Walk(const Share& share, int lane, Use use) {
  for (int begin = share.begin + lane; begin - lane < share.end; begin += 32 * kBatch) {
    uint32_t score[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = begin + 32 * b;
      score[b] = i < share.end ? share.scores[i] : 0;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) use(begin + 32 * b, score[b], begin + 32 * b < share.end);
  }
}

// The sum of `value` over this thread and those before it; `sums` [kWarps] is free after the next
// barrier.
__device__ int RunningSum(int value, int* sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  return value + WarpSum(lane < warp ? sums[lane] : 0);
}

struct SelectShared {
  uint32_t counts[kBins];
  int sums[kWarps];
  int ties[kWarps];
  Cut cut;
  bool exact;
};

// Narrows the cut to its next digit, which ends at bit `shift`: counts the scores that agree so far
// by that digit, and finds the bin in which the wanted-th from the top lies. All threads together.
__device__ void NarrowCut(const Share& share, int shift, SelectShared& shared) {
  const int thread = threadIdx.x, lane = thread % 32;
  for (int i = thread; i < kBins; i += kSelectThreads) shared.counts[i] = 0;
  const Cut cut = shared.cut;
  const int bits = cut.shift - shift;
  __syncthreads();
  Walk(share, lane, [&](int, uint32_t score, bool inside) {
    if (inside && score >> cut.shift == cut.digits) {
      const uint32_t digit = score >> shift & ((1u << bits) - 1);
      atomicAdd(&shared.counts[digit], 1u);
    }
  });
  __syncthreads();
  // Thread i has bins 2047 - 2i and 2046 - 2i: the running sum goes from the highest digit down.
  const int high = kBins - 1 - 2 * thread;
  const int count[2] = {static_cast<int>(shared.counts[high]),
                        static_cast<int>(shared.counts[high - 1])};
  int above = RunningSum(count[0] + count[1], shared.sums) - count[0] - count[1];
  for (int b = 0; b < 2; ++b) {
    if (above < cut.wanted && cut.wanted <= above + count[b]) {
      const uint32_t digits = cut.digits << bits | static_cast<uint32_t>(high - b);
      shared.cut = {digits, shift, cut.wanted - above};
      shared.exact = cut.wanted - above == count[b];
    }
    above += count[b];
  }
  __syncthreads();
}

// Writes the chosen blocks in ascending order. All threads together.
__device__ void WriteChosen(const Share& share, SelectShared& shared, int32_t* blocks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Cut cut = shared.cut;
  int above = 0, ties = 0;
  Walk(share, lane, [&](int, uint32_t score, bool inside) {
    const uint32_t digits = score >> cut.shift;
    above += __popc(__ballot_sync(kAllLanes, inside && digits > cut.digits));
    ties += __popc(__ballot_sync(kAllLanes, inside && digits == cut.digits));
  });
  if (lane == 0) {
    shared.sums[warp] = above;
    shared.ties[warp] = ties;
  }
  __syncthreads();
  // From here on both count the scores before the warp's next batch.
  above = WarpSum(lane < warp ? shared.sums[lane] : 0);
  ties = WarpSum(lane < warp ? shared.ties[lane] : 0);
  const unsigned lower = (1u << lane) - 1;
  Walk(share, lane, [&](int index, uint32_t score, bool inside) {
    const uint32_t digits = score >> cut.shift;
    const unsigned is_above = __ballot_sync(kAllLanes, inside && digits > cut.digits);
    const unsigned is_tie = __ballot_sync(kAllLanes, inside && digits == cut.digits);
    const int ties_before = ties + __popc(is_tie & lower);
    const bool chosen =
        (is_above >> lane & 1) != 0 || ((is_tie >> lane & 1) != 0 && ties_before < cut.wanted);
    if (chosen) blocks[above + __popc(is_above & lower) + min(ties_before, cut.wanted)] = index;
    above += __popc(is_above);
    ties += __popc(is_tie);
  });
}

__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ QsaSelectArgs a, int first_row) {
  __shared__ SelectShared shared;
  const int t = first_row + blockIdx.x, thread = threadIdx.x;
  const int live = LiveRows(*a.live, a.num_rows), pos = *a.pos;
  int32_t* blocks = a.blocks + static_cast<int64_t>(t) * a.num_blocks;
  const int seen = CompleteBlocks(a, pos, t), complete = t < live ? seen : 0;
  if (complete <= a.num_blocks) {
    for (int i = thread; i < a.num_blocks; i += kSelectThreads) blocks[i] = i < complete ? i : -1;
    return;
  }
  const int capacity = a.num_groups * kGroup;
  const int batches = (complete + 32 * kBatch - 1) / (32 * kBatch);
  const int most = (batches + kWarps - 1) / kWarps * 32 * kBatch;  // scores of a warp
  const int begin = min(thread / 32 * most, complete);
  const Share share = {a.scores + static_cast<int64_t>(blockIdx.x) * capacity, begin,
                       min(begin + most, complete)};
  if (thread == 0) {
    shared.cut = {0, 31, a.num_blocks};
    shared.exact = false;
  }
  __syncthreads();
  for (int shift = 20; shift >= 0; shift -= 10) {
    // Where the last bin is wanted whole there is nothing to tell apart in it.
    if (!shared.exact) NarrowCut(share, shift, shared);
  }
  WriteChosen(share, shared, blocks);
}

std::string ScoreRows(const QsaSelectArgs& args, int first, int rows, cudaStream_t stream) {
  const int capacity = args.num_groups * kGroup;
  Shape shape;
  shape.stream = stream;
  shape.grid = dim3(static_cast<unsigned>((capacity + kScoreBlocks - 1) / kScoreBlocks),
                    static_cast<unsigned>((rows + kScoreRows - 1) / kScoreRows));
  shape.block = dim3(kScoreThreads);
  return Launch(ScoreKernel, shape, args, first, rows);
}

}  // namespace

int64_t QsaSelectWorkspace(int64_t num_rows, int64_t num_groups) {
  const int64_t row_bytes = num_groups * kGroup * static_cast<int64_t>(sizeof(float));
  return std::min(num_rows, std::max(kRowsAtOnce, kTileScores / row_bytes)) * row_bytes;
}

std::string QsaSelect(const QsaSelectArgs& args, cudaStream_t stream) {
  std::string error;
  for (int first = 0; first < args.num_rows && error.empty(); first += args.rows_at_once) {
    const int rows = std::min(args.rows_at_once, args.num_rows - first);
    error = ScoreTilesApply(args) ? ScoreTiles(args, first, rows, stream)
                                  : ScoreRows(args, first, rows, stream);
    if (!error.empty()) break;
    Shape shape;
    shape.stream = stream;
    shape.grid = dim3(static_cast<unsigned>(rows));
    shape.block = dim3(kSelectThreads);
    error = Launch(SelectKernel, shape, args, first);
  }
  return error;
}

}  // namespace strata
