// The last kernels of hyper_read for tiles, by group instructions (group_mma_floats.cuh).
//
// The product with up and the mixing: a block stays and takes tiles of 64 rows and 64 columns of
// every stream, so that a thread has all that a value of x is mixed from. It takes one column of
// tiles after the other: the column's weights stay in shared memory. Two groups of warps take the
// tiles in turn: while one multiplies, the other mixes. Four warps fill what they read: the rows,
// the weights, and the streams' values, which would need more lines of the first cache than there
// are beside so much shared memory.
#pragma once

#include "cuda/ops/hyper_read_wide_down.cuh"

namespace strata::hyper {

inline constexpr int kWideUpThreads = kMultiplying + 128;
inline constexpr int kUpWideColumns = 256;                // of up: 64 of every stream
inline constexpr int kColumnsLine = kUpWideColumns * 16;  // a chunk of them
inline constexpr int kRowsLine = kGroupRows * 16;         // a chunk of the rows
inline constexpr int kRowsStage = 4 * kRowsLine;          // 16 values: high, low
// 16 columns of the tile's streams, [row][stream][64 bytes], chunks of 16 bytes exchanged so that
// neighbours' are in different banks.
inline constexpr int kStreamedStage = kGroupRows * kStreams * 64;

// The block's shared memory.
template <int kRank>
struct UpLayout {
  static constexpr int kPieces = kRank / 32;                       // of the weights
  static constexpr int kPlaces = kRank / 16 < 8 ? kRank / 16 : 8;  // of rows, 16 values each
  static constexpr int kNorm = 1024;                               // of this column and the next
  static constexpr int kWeights = kNorm + 2 * kUpWideColumns * 4;
  static constexpr int kRows = kWeights + kRank / 8 * kColumnsLine;
  static constexpr int kStreamed = kRows + kPlaces * kRowsStage;
  static constexpr int kBytes = kStreamed + 2 * kStreamedStage;
};

struct UpBarriers {
  Barrier full[10];  // pieces of weights
  Barrier empty;     // all of them
  Barrier turns[2];  // to multiply
  Barrier mixes[2];  // to mix
  Barrier full_rows[8];
  Barrier empty_rows[8];
  Barrier full_streamed[2];
  Barrier empty_streamed[2];
};
static_assert(sizeof(UpBarriers) <= 1024);

// Where the input of up has 8 values of a row from `column` on; the low halves 2 kRowsLine on.
// [tile][16 values][high, low][chunk][row][16 bytes]
__device__ __forceinline__ int64_t RowsAt(int row, int column, int rank) {
  return static_cast<int64_t>(row / kGroupRows * (rank / 16) + column / 16) * kRowsStage +
         column / 8 % 2 * kRowsLine + row % kGroupRows * 16;
}

inline constexpr int kWideJoinThreads = 128;
inline constexpr int kJoinRows = 16;

// Eight values of a row of up's input, from the sums of its streams.
__device__ __forceinline__ void JoinEight(const TileParams& p, int row, int column, bool live) {
  float sum[8] = {};
  if (live) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float4* from =
          reinterpret_cast<const float4*>(p.sums + (row * kStreams + s) * p.rank + column);
      const float4 left = from[0], right = from[1];
      sum[0] += left.x, sum[1] += left.y, sum[2] += left.z, sum[3] += left.w;
      sum[4] += right.x, sum[5] += right.y, sum[6] += right.z, sum[7] += right.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = SiluMul(sum[i] / kStreams, 1.0f);
  const SplitPair a = Split(sum[0], sum[1]), b = Split(sum[2], sum[3]);
  const SplitPair c = Split(sum[4], sum[5]), d = Split(sum[6], sum[7]);
  unsigned char* to = p.mixed + RowsAt(row, column, p.rank);
  *reinterpret_cast<uint4*>(to) = make_uint4(a.high, b.high, c.high, d.high);
  *reinterpret_cast<uint4*>(to + 2 * kRowsLine) = make_uint4(a.low, b.low, c.low, d.low);
}

// The input of up, and the next beta. A block has 16 rows.
__global__ void __launch_bounds__(kWideJoinThreads)
    WideJoinKernel(const __grid_constant__ TileParams p) {
  const int num_live = LiveRows(*p.live, p.num_rows);
  const int first_row = blockIdx.x * kJoinRows;
  if (threadIdx.x < kJoinRows * kStreams) {
    const int row = first_row + threadIdx.x / kStreams, stream = threadIdx.x % kStreams;
    float beta = 0.0f;
    if (row < num_live && p.has_inject) {
      for (int s = 0; s < kStreams; ++s) {
        beta += p.injected[(row * kStreams + s) * kStreams + stream];
      }
      beta = 2.0f * Sigmoid(beta / kStreams);
    }
    p.next_beta[row * kStreams + stream] = beta;
  }
  if (first_row >= num_live) return;
  for (int at = threadIdx.x; at < p.rank / 8 * kJoinRows; at += kWideJoinThreads) {
    const int row = first_row + at % kJoinRows;
    JoinEight(p, row, at / kJoinRows * 8, row < num_live);
  }
}

#if STRATA_GROUPS

// As GateOf, without the operators' cases for tiny and huge numbers: what is too large for float is
// infinite, and its inverse 0.
__device__ __forceinline__ float QuickGate(float x) {
#if defined(STRATA_EMULATE)
  return GateOf(x);
#else
  float power, gate;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(gate) : "f"(1.0f + power));
  return gate;
#endif
}

// A block's tiles of 64 rows and 64 columns of every stream: one column of tiles after the other.
struct UpTiles {
  int rows, first, end;  // tiles of rows; of the block

  __device__ __forceinline__ UpTiles(const TileParams& p, int num_live) {
    rows = (num_live + kGroupRows - 1) / kGroupRows;
    const int64_t total = static_cast<int64_t>(rows) * (p.width / 64);
    first = static_cast<int>(blockIdx.x * total / gridDim.x);
    end = static_cast<int>((blockIdx.x + 1) * total / gridDim.x);
  }
};

// The rows of all tiles, by a warp.
template <int kRank>
__device__ __forceinline__ void FillRows(const TileParams& p, const UpTiles& tiles, uint8_t* rows,
                                         UpBarriers* b) {
  RingPlace<UpLayout<kRank>::kPlaces> at;
  if (threadIdx.x % 32 != 0) return;
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    const uint8_t* from = p.mixed + RowsAt(tile % tiles.rows * kGroupRows, 0, kRank);
#pragma unroll 1
    for (int chunk = 0; chunk < kRank / 16; ++chunk) {
      AwaitPhase(b->empty_rows + at.place, at.parity ^ 1);
      ExpectBytes(b->full_rows + at.place, kRowsStage);
      CopyBulk(rows + at.place * kRowsStage, from + chunk * kRowsStage, kRowsStage,
               b->full_rows + at.place);
      at.Next();
    }
  }
}

// The weights and gammas of a column of tiles after the other, by a warp.
template <int kRank>
__device__ __forceinline__ void FillUp(const TileParams& p, const UpTiles& tiles, uint8_t* shared,
                                       UpBarriers* b) {
  using Layout = UpLayout<kRank>;
  const int lane = threadIdx.x % 32;
  const auto show = [&](int piece) {
    PublishToUnits();
    ArriveAt(b->full + piece);
  };
  unsigned parity = 0;
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.end; parity ^= 1) {
    const int column = tile / tiles.rows;
    if (tile != tiles.first) AwaitPhase(&b->empty, parity ^ 1);
    for (int i = lane; i < kUpWideColumns / 4; i += 32) {
      CopyAsync(shared + Layout::kNorm + parity * kUpWideColumns * 4 + i * 16,
                p.norm + i / 16 * p.width + column * 64 + i % 16 * 4, true);
    }
#pragma unroll 1
    for (int piece = 0; piece < Layout::kPieces; ++piece) {
      uint8_t* to = shared + Layout::kWeights + piece * 4 * kColumnsLine + lane * 16;
      const uint8_t* from =
          p.up.bytes + column * 2 * p.up.panel_bytes + StepAt(p.up, piece * 32) + lane * 16;
#pragma unroll 1
      for (int s = 0; s < kStreams; ++s) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          CopyAsync(to + i % 4 * kColumnsLine + i / 4 * 512,
                    from + i / 4 * p.up.panel_bytes + i % 4 * 512, true);
        }
        to += 1024;
        from += p.width / 32 * p.up.panel_bytes;
      }
      EndCopyGroup();
      if (piece > 0) {
        WaitForGroups<1>();
        show(piece - 1);
      }
    }
    WaitForGroups<0>();
    show(Layout::kPieces - 1);
    tile = min(tiles.end, (column + 1) * tiles.rows);
  }
}

// Where 4 of the 16 columns of a place lie.
__device__ __forceinline__ int StreamedAt(int row, int stream, int chunk) {
  return (row * kStreams + stream) * 64 + (chunk ^ (row & 2)) * 16;
}

// The lines of those values of a tile on their way to the second cache, by two warps.
__device__ __forceinline__ void AskStreamed(const TileParams& p, const UpTiles& tiles, int tile,
                                            int num_live) {
#if !defined(STRATA_EMULATE)
  const int row = tile % tiles.rows * kGroupRows, column = tile / tiles.rows * 64;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = row * kStreams + static_cast<int>(threadIdx.x) % 64 / 2 + 32 * i;
    if (at >= num_live * kStreams) continue;
    const float* line = p.new_streams + at * p.width + column + threadIdx.x % 2 * 32;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
#else
  (void)p, (void)tiles, (void)tile, (void)num_live;
#endif
}

// The streams of a tile's rows that its gates are for, by two warps: one fills the first place,
// one the other.
template <int kRank>
__device__ __forceinline__ void FillStreamed(const TileParams& p, const UpTiles& tiles,
                                             int num_live, uint8_t* streamed, UpBarriers* b) {
  const int place = threadIdx.x / 32 % 2, thread = threadIdx.x % 32;
  unsigned parity = 1;
  uint8_t* own = streamed + place * kStreamedStage;
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    const int row = tile % tiles.rows * kGroupRows, column = tile / tiles.rows * 64;
    if (tile + 1 < tiles.end) AskStreamed(p, tiles, tile + 1, num_live);
#pragma unroll 1
    for (int quarter = place; quarter < 4; quarter += 2) {
      const float* from = p.new_streams + (row * kStreams + thread / 4) * p.width + column +
                          quarter * 16 + thread % 4 * 4;
      AwaitPhase(b->empty_streamed + place, parity);
#pragma unroll
      for (int i = 0; i < kGroupRows * kStreams / 8; ++i) {
        const int at = thread / 4 + 8 * i;
        CopyAsync(own + StreamedAt(at / kStreams, at % kStreams, thread % 4),
                  from + 8 * i * p.width, true);
      }
      ArriveBehindCopies(b->full_streamed + place);
      parity ^= 1;
    }
  }
}

// A thread's two rows of a tile.
struct MixRows {
  float* x;
  float scales[2][kStreams];
  bool live[2];
  int width, row;

  __device__ __forceinline__ MixRows(const TileParams& p, int tile, int column, int num_live)
      : width(p.width), row(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {
    const int at = tile * kGroupRows + row;
    x = p.x + at * width + column * 64 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      live[i] = at + 8 * i < num_live;
      const float4 four = *reinterpret_cast<const float4*>(p.scales + (at + 8 * i) * kStreams);
      scales[i][0] = four.x, scales[i][1] = four.y, scales[i][2] = four.z, scales[i][3] = four.w;
    }
  }
  // Columns 8 j on; `half`: of the 16 in `streamed`.
  __device__ __forceinline__ void Store(int j, int half, const uint8_t* streamed, const float* norm,
                                        const float (&gates)[kUpWideColumns / 8][4]) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const float2 gamma = *reinterpret_cast<const float2*>(norm + s * 64 + 8 * j);
        const float2 v = *reinterpret_cast<const float2*>(
            streamed + StreamedAt(row + 8 * i, s, half * 2 + t / 2) + t % 2 * 8);
        const float* of = gates[s * 8 + j] + 2 * i;
        sum.x = fmaf(QuickGate(of[0]), v.x * scales[i][s] * gamma.x, sum.x);
        sum.y = fmaf(QuickGate(of[1]), v.y * scales[i][s] * gamma.y, sum.y);
      }
      sum = live[i] ? make_float2(sum.x / kStreams, sum.y / kStreams) : make_float2(0.0f, 0.0f);
      *reinterpret_cast<float2*>(x + 8 * i * width + 8 * j) = sum;
    }
  }
};

// A group of warps that multiplies and mixes every other tile of the block.
template <int kRank>
struct UpGroup {
  using Layout = UpLayout<kRank>;
  static constexpr int kChunks = kRank / 16;
  const TileParams& p;
  uint8_t* shared;
  UpBarriers* b;
  int group, num_live;

  // The groups take turns: where one tile is multiplied or mixed the next one waits.
  __device__ __forceinline__ void AwaitTurn(Barrier* turns, int turn) const {
    if (group == 1) AwaitPhase(turns + 1, turn & 1);
    if (group == 0 && turn > 0) AwaitPhase(turns, (turn - 1) & 1);
  }
  __device__ __forceinline__ void PassTurn(Barrier* turns) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveAt(turns + 1 - group);
  }

  // A place of the ring was read.
  __device__ __forceinline__ void Release(int place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveAt(b->empty_rows + place);
  }

  // `number`: of the block's tiles.
  __device__ __forceinline__ void Multiply(int number, unsigned parity,
                                           float (&gates)[kUpWideColumns / 8][4]) const {
    constexpr int kPending = 2;  // chunks
    const uint64_t all_rows = ColumnsOperand(shared + Layout::kRows, kRowsLine);
    uint64_t columns = ColumnsOperand(shared + Layout::kWeights, kColumnsLine);
    RingPlace<Layout::kPlaces> at, done;
    at.place = done.place = number * kChunks % Layout::kPlaces;
    at.parity = number * kChunks / Layout::kPlaces & 1;
    AwaitTurn(b->turns, number / 2);
    int chunk = 0;
#pragma unroll 1
    do {
      if (chunk % 2 == 0) AwaitPhase(b->full + chunk / 2, parity);
      AwaitPhase(b->full_rows + at.place, at.parity);
      const uint64_t rows = AdvanceOperand(all_rows, at.place * kRowsStage);
      GroupFence();
      BeginGroupMma(gates, AdvanceOperand(rows, 2 * kRowsLine), columns);
      BeginGroupMma(gates, rows, columns);
      EndProducts();
      columns = AdvanceOperand(columns, 2 * kColumnsLine);
      at.Next();
      WaitForProducts<kPending>();
      if (chunk >= kPending) {
        Release(done.place);
        done.Next();
      }
    } while (++chunk < kChunks);
    PassTurn(b->turns);
    WaitForProducts<0>();
    HoldSums(gates);
#pragma unroll
    for (int i = 0; i < kPending; ++i) {
      Release(done.place);
      done.Next();
    }
  }

  __device__ __forceinline__ void Run(int tile, int column, int number, unsigned parity,
                                      bool is_last) const {
    const MixRows rows(p, tile, column, num_live);
    float gates[kUpWideColumns / 8][4];
#pragma unroll
    for (int j = 0; j < kUpWideColumns / 8; ++j) {
      gates[j][0] = gates[j][1] = gates[j][2] = gates[j][3] = 0.0f;
    }
    Multiply(number, parity, gates);
    const float* norm = reinterpret_cast<const float*>(shared + Layout::kNorm) +
                        parity * kUpWideColumns + threadIdx.x % 4 * 2;
    AwaitTurn(b->mixes, number / 2);
    // The column's weights are free, and the gammas of the column before.
    if (is_last && threadIdx.x % 32 == 0) ArriveAt(&b->empty);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int place = quarter % 2;
      // A place is filled twice a tile.
      AwaitPhase(b->full_streamed + place, quarter / 2);
      const uint8_t* streamed = shared + Layout::kStreamed + place * kStreamedStage;
      rows.Store(2 * quarter, 0, streamed, norm, gates);
      rows.Store(2 * quarter + 1, 1, streamed, norm, gates);
      ArriveAt(b->empty_streamed + place);
    }
    PassTurn(b->mixes);
  }

  __device__ __forceinline__ void RunAll(const UpTiles& tiles) const {
    unsigned parity = 0;
#pragma unroll 1
    for (int at = tiles.first; at < tiles.end; parity ^= 1) {
      const int column = at / tiles.rows;
      const int until = min(tiles.end, (column + 1) * tiles.rows);
      at += ((at - tiles.first) & 1) != group;
#pragma unroll 1
      for (; at < until; at += 2) {
        Run(at - column * tiles.rows, column, at - tiles.first, parity, at + 1 == until);
      }
      at = until;
    }
  }
};

template <int kRank>
__global__ void __launch_bounds__(kWideUpThreads, 1)
    WideUpKernel(const __grid_constant__ TileParams p) {
  using Layout = UpLayout<kRank>;
  STRATA_SHARED(uint8_t, shared);
  UpBarriers* b = reinterpret_cast<UpBarriers*>(shared);
  const int num_live = LiveRows(*p.live, p.num_rows);
  const UpTiles tiles(p, num_live);
  for (int64_t at = static_cast<int64_t>(tiles.rows) * kGroupRows * p.width +
                    4 * (blockIdx.x * kWideUpThreads + threadIdx.x);
       at < static_cast<int64_t>(p.num_rows) * p.width; at += 4 * kWideUpThreads * gridDim.x) {
    *reinterpret_cast<float4*>(p.x + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (threadIdx.x == 0) {
    // Where threads copy and read with loads and stores of their own, each of them arrives.
    for (int i = 0; i < Layout::kPieces; ++i) InitBarrier(b->full + i, 32);
    InitBarrier(&b->empty, 4);
    for (int i = 0; i < 2; ++i) InitBarrier(b->turns + i, 4), InitBarrier(b->mixes + i, 4);
    for (int i = 0; i < Layout::kPlaces; ++i) {
      InitBarrier(b->full_rows + i, 1);
      InitBarrier(b->empty_rows + i, 4);
    }
    for (int i = 0; i < 2; ++i) {
      InitBarrier(b->full_streamed + i, 32);
      InitBarrier(b->empty_streamed + i, 128);
    }
    PublishToUnits();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    TakeRegisters<208>();
    const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
    const UpGroup<kRank> of = {p, shared, b, group, num_live};
    of.RunAll(tiles);
  } else {
    KeepRegisters<88>();
    const int warp = threadIdx.x / 32 - kMultiplying / 32;
    if (warp == 0) {
      FillRows<kRank>(p, tiles, shared + Layout::kRows, b);
    } else if (warp == 1) {
      FillUp<kRank>(p, tiles, shared, b);
    } else {
      FillStreamed<kRank>(p, tiles, num_live, shared + Layout::kStreamed, b);
    }
  }
}

#else

// For other chips of a build for several: never launched there.
template <int kRank>
__global__ void WideUpKernel(const __grid_constant__ TileParams) {}

#endif

}  // namespace strata::hyper
