// gdn_chunk's first kernel: everything of a chunk that needs no state.
//
// A block has a chunk and a key head with its value heads. Warp w convolves rows 8w to 8w + 7, its
// lanes the channels.
#pragma once

#include "cuda/ops/gdn_chunk_parts.cuh"

namespace strata::gdn {

inline constexpr int kPrepareWarps = 8;
inline constexpr int kRowsOfWarp = kGdnChunk / kPrepareWarps;
inline constexpr int kHeadsAtOnce = 3;    // value heads whose systems are solved side by side
inline constexpr int kSystemPitch = 68;   // floats: rows of a system begin at multiples of 16 bytes
inline constexpr int kProductPitch = 66;  // floats: rows of a tile's writes in different banks

template <int kDim>
struct alignas(16) PrepareShared {
  union {
    struct {
      unsigned char keys[kDim / 64 * kPieceBytes];
      unsigned char queries[kDim / 64 * kPieceBytes];
    };
    float systems[kHeadsAtOnce][kGdnChunk * kSystemPitch];  // once the products are made
  };
  float key_key[kGdnChunk * kProductPitch];  // row i, column j <= i
  float query_key[kGdnChunk * kProductPitch];
  float sums[kHeadsAtOnce][kGdnChunk];  // c: of the log decays up to a row
  float betas[kHeadsAtOnce][kGdnChunk];
};

template <int kCount, typename T = float>
struct alignas(4 * kCount) Run {
  T at[kCount];
};

// A lane's channels of the warp's rows, and of the three before them.
template <int kDim>
struct Inputs {
  Run<kDim / 32> at[kRowsOfWarp + 3];

  __device__ __forceinline__ void Load(const ChunkParams& p, int first_row, int num_live,
                                       int channel) {
    using Lane = Run<kDim / 32>;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp + 3; ++i) {
      const int row = first_row + i - 3;
      at[i] = {};
      if (row < 0) {
        at[i] = *reinterpret_cast<const Lane*>(p.a.conv_state + (row + 3) * p.channels + channel);
      } else if (row < num_live) {
        at[i] = *reinterpret_cast<const Lane*>(p.a.proj + row * p.stride + channel);
      }
    }
  }
};

// The rows after convolution and SiLU; zero where one is dead.
template <int kDim>
__device__ __forceinline__ void Convolve(const ChunkParams& p, const Inputs<kDim>& inputs,
                                         int first_row, int num_live, int channel,
                                         Run<kDim / 32> (&to)[kRowsOfWarp]) {
  Run<kDim / 32> weights[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    weights[j] =
        *reinterpret_cast<const Run<kDim / 32>*>(p.a.conv_weight + j * p.channels + channel);
  }
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = __fmaf_rn(weights[j].at[k], inputs.at[i + j].at[k], sum);
      // SiLU, as exact as the products that follow.
      sum = __fdividef(sum, 1.0f + __expf(-sum));
      to[i].at[k] = first_row + i < num_live ? sum : 0.0f;
    }
  }
}

// Scales a head's rows to length `length`, splits them and leaves them in both memories.
template <int kDim>
__device__ __forceinline__ void StoreUnit(const Run<kDim / 32> (&rows)[kRowsOfWarp], float length,
                                          unsigned char* shared, unsigned char* global) {
  constexpr int kEach = kDim / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kEach; ++k) squares = __fmaf_rn(rows[i].at[k], rows[i].at[k], squares);
    const float scale = 1.0f / sqrtf(WarpSum(squares) + kUnitEps) * length;
    const int row = threadIdx.x / 32 * kRowsOfWarp + i;
    const int column = lane * kEach;
    const int at = column / 64 * kPieceBytes + PairAt(row, column % 64);
    Run<kEach / 2, uint32_t> high, low;
#pragma unroll
    for (int k = 0; k < kEach; k += 2) {
      const SplitPair pair = Split(rows[i].at[k] * scale, rows[i].at[k + 1] * scale);
      high.at[k / 2] = pair.high;
      low.at[k / 2] = pair.low;
    }
    for (unsigned char* to : {shared, global}) {
      *reinterpret_cast<Run<kEach / 2, uint32_t>*>(to + at) = high;
      *reinterpret_cast<Run<kEach / 2, uint32_t>*>(to + at + kPlaneBytes) = low;
    }
  }
}

// The gates of a head's rows, by one warp: a lane has two rows.
__device__ __forceinline__ void MakeGates(const ChunkParams& p, int chunk, int head, int num_live,
                                          float* sums, float* betas) {
  const int lane = threadIdx.x % 32;
  const int value_heads = static_cast<int>(p.a.value_heads);
  float log_decay[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = chunk * kGdnChunk + 2 * lane + i;
    float beta = 0.0f;
    log_decay[i] = 0.0f;
    if (row < num_live) {
      const float* end = p.a.proj + (row + 1) * p.stride;
      const float x = end[head - 2 * value_heads] + p.a.dt_bias[head];
      const float softplus = x > 20.0f ? x : log1pf(expf(x));
      log_decay[i] = p.a.decay[head] * softplus;
      beta = Sigmoid(end[head - value_heads]);
    }
    betas[2 * lane + i] = beta;
  }
  // Sums over the lanes up to this one; a row's depends on no later row.
  float sum = log_decay[0] + log_decay[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  const float before = __shfl_up_sync(kAllLanes, sum, 1);
  const float first = (lane > 0 ? before : 0.0f) + log_decay[0];
  sums[2 * lane] = first;
  sums[2 * lane + 1] = first + log_decay[1];
  __syncwarp();
  float* gates = p.gates + (chunk * value_heads + head) * kGateFloats;
#pragma unroll
  for (int row = lane; row < kGdnChunk; row += 32) {
    gates[kBeta * kGdnChunk + row] = betas[row];
    gates[kFromStart * kGdnChunk + row] = expf(sums[row]);
    gates[kToEnd * kGdnChunk + row] = expf(sums[kGdnChunk - 1] - sums[row]);
  }
}

// k k^T and q k^T: a warp has 16 rows and 32 columns of both.
template <int kDim>
__device__ __forceinline__ void MultiplyKeys(PrepareShared<kDim>* shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_row = warp % 4 * 16;
  const int first_tile = warp / 4 * 4;
  if (first_tile * 8 > first_row + 15) return;  // above the diagonal
  float key_key[4][4] = {}, query_key[4][4] = {};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int piece = step / 4 * kPieceBytes;
    // Two tiles of eight rows as B have the values of one tile of 16 rows as A.
    uint32_t k[2][4], q[2][4], b[4][4];
    LoadRowTiles<2>(shared->keys + piece, step % 4, first_row / 8, k);
    LoadRowTiles<2>(shared->queries + piece, step % 4, first_row / 8, q);
    LoadRowTiles<4>(shared->keys + piece, step % 4, first_tile, b);
    const SplitA keys = {{k[0][0], k[1][0], k[0][1], k[1][1]},
                         {k[0][2], k[1][2], k[0][3], k[1][3]}};
    const SplitA queries = {{q[0][0], q[1][0], q[0][1], q[1][1]},
                            {q[0][2], q[1][2], q[0][3], q[1][3]}};
    MultiplySplit<4>(keys, b, key_key);
    MultiplySplit<4>(queries, b, query_key);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at =
          (first_row + lane / 4 + 8 * half) * kProductPitch + (first_tile + i) * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(shared->key_key + at) =
          make_float2(key_key[i][2 * half], key_key[i][2 * half + 1]);
      *reinterpret_cast<float2*>(shared->query_key + at) =
          make_float2(query_key[i][2 * half], query_key[i][2 * half + 1]);
    }
  }
}

__device__ __forceinline__ void StorePair(unsigned char* piece, int row, int column, float first,
                                          float second) {
  const SplitPair pair = Split(first, second);
  *reinterpret_cast<uint32_t*>(piece + PairAt(row, column)) = pair.high;
  *reinterpret_cast<uint32_t*>(piece + PairAt(row, column) + kPlaneBytes) = pair.low;
}

// A head's system A and its decayed weights, by all threads. Masked before exp: above the diagonal
// the difference is positive and may overflow.
template <int kDim>
__device__ __forceinline__ void Decay(PrepareShared<kDim>* shared, int place,
                                      unsigned char* weights) {
  const float* sums = shared->sums[place];
  for (int pair = threadIdx.x; pair < kGdnChunk * 32; pair += kPrepareWarps * 32) {
    const int row = pair / 32;
    const int column = pair % 32 * 2;
    float weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (column + k > row) continue;
      const float decay = __expf(sums[row] - sums[column + k]);
      const int at = row * kProductPitch + column + k;
      weight[k] = shared->query_key[at] * decay;
      if (column + k == row) continue;
      shared->systems[place][row * kSystemPitch + column + k] =
          shared->betas[place][row] * shared->key_key[at] * decay;
    }
    StorePair(weights, row, column, weight[0], weight[1]);
  }
}

// The inverse of I + A in place of A, strictly lower triangular, by forward substitution: a thread
// has a column, 16 rows at a time, of which only those rows of A are left that no step before
// needed. Threads without a column (`works`) keep the barriers company.
__device__ __forceinline__ void SolveColumn(float* system, int column, bool works) {
  constexpr int kRows = 16;
#pragma unroll 1
  for (int first = 0; first < kGdnChunk; first += kRows) {
    const float* rows = system + first * kSystemPitch;
    float x[kRows];
    if (works) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = first + i == column ? 1.0f : 0.0f;
#pragma unroll 1
      for (int from = 0; from < first; from += 4) {
        float known[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) known[k] = system[(from + k) * kSystemPitch + column];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float4 a = *reinterpret_cast<const float4*>(rows + i * kSystemPitch + from);
          x[i] = __fmaf_rn(-a.x, known[0], x[i]);
          x[i] = __fmaf_rn(-a.y, known[1], x[i]);
          x[i] = __fmaf_rn(-a.z, known[2], x[i]);
          x[i] = __fmaf_rn(-a.w, known[3], x[i]);
        }
      }
#pragma unroll
      for (int i = 1; i < kRows; ++i) {
#pragma unroll
        for (int k = 0; k < i; ++k) {
          x[i] = __fmaf_rn(-rows[i * kSystemPitch + first + k], x[k], x[i]);
        }
      }
    }
    __syncthreads();
    if (works) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) system[(first + i) * kSystemPitch + column] = x[i];
    }
  }
}

// Convolution and norms of the block's chunk: q and k to both memories, the values to y, where the
// second kernel puts its results. Inputs are asked for a part ahead.
template <int kDim>
__device__ __forceinline__ void PrepareRows(const ChunkParams& p, int num_live,
                                            PrepareShared<kDim>* shared) {
  constexpr int kHeadBytes = kDim / 64 * kPieceBytes;
  const int key_heads = static_cast<int>(p.a.key_heads);
  const int value_heads = static_cast<int>(p.a.value_heads);
  const int key_head = blockIdx.x;
  const int first_row = blockIdx.y * kGdnChunk + threadIdx.x / 32 * kRowsOfWarp;
  const int own = threadIdx.x % 32 * (kDim / 32);  // the lane's first channel of a head
  const int64_t key_at = static_cast<int64_t>(blockIdx.y * key_heads + key_head) * kHeadBytes;
  // Parts: q, k and the values of every value head of the key head.
  const auto channel_of = [&](int part) { return (part * key_heads + key_head) * kDim + own; };
  Inputs<kDim> inputs;
  inputs.Load(p, first_row, num_live, channel_of(0));
#pragma unroll 1
  for (int part = 0; part < 2 + value_heads / key_heads; ++part) {
    Run<kDim / 32> rows[kRowsOfWarp];
    Convolve<kDim>(p, inputs, first_row, num_live, channel_of(part), rows);
    if (part + 1 < 2 + value_heads / key_heads) {
      inputs.Load(p, first_row, num_live, channel_of(part + 1));
    }
    if (part >= 2) {
      const int head = (part - 2) * key_heads + key_head;
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        float* to = p.a.y + (first_row + r) * value_heads * kDim + head * kDim + own;
        *reinterpret_cast<Run<kDim / 32>*>(to) = rows[r];
      }
      continue;
    }
    const float length = part == 0 ? 1.0f / sqrtf(static_cast<float>(kDim)) : 1.0f;
    StoreUnit<kDim>(rows, length, part == 0 ? shared->queries : shared->keys,
                    (part == 0 ? p.queries : p.keys) + key_at);
  }
}

// Systems and weights of up to kHeadsAtOnce value heads, from `first` of the key head's on.
template <int kDim>
__device__ __forceinline__ void PrepareHeads(const ChunkParams& p, int first, int num_live,
                                             PrepareShared<kDim>* shared) {
  const int key_heads = static_cast<int>(p.a.key_heads);
  const int value_heads = static_cast<int>(p.a.value_heads);
  const int chunk = blockIdx.y;
  const int warp = threadIdx.x / 32;
  const int count = min(kHeadsAtOnce, value_heads / key_heads - first);
  const auto head_of = [&](int i) {
    return (first + i) * key_heads + static_cast<int>(blockIdx.x);
  };
  const auto piece_at = [&](unsigned char* pieces, int i) {
    return pieces + static_cast<int64_t>(chunk * value_heads + head_of(i)) * kPieceBytes;
  };
  if (warp < count) {
    MakeGates(p, chunk, head_of(warp), num_live, shared->sums[warp], shared->betas[warp]);
  }
  __syncthreads();
  for (int i = 0; i < count; ++i) Decay<kDim>(shared, i, piece_at(p.weights, i));
  __syncthreads();
  const int place = threadIdx.x / kGdnChunk;
  SolveColumn(shared->systems[min(place, kHeadsAtOnce - 1)], threadIdx.x % kGdnChunk,
              place < count);
  __syncthreads();
  for (int pair = threadIdx.x; pair < count * kGdnChunk * 32; pair += kPrepareWarps * 32) {
    const int i = pair / (kGdnChunk * 32);
    const int row = pair / 32 % kGdnChunk;
    const float* at = shared->systems[i] + row * kSystemPitch + pair % 32 * 2;
    StorePair(piece_at(p.inverse, i), row, pair % 32 * 2, at[0], at[1]);
  }
  __syncthreads();
}

template <int kDim>
__global__ void __launch_bounds__(kPrepareWarps * 32, 2)
    GdnPrepareKernel(const __grid_constant__ ChunkParams p) {
  STRATA_SHARED(PrepareShared<kDim>, shared);
  const int num_live = LiveRows(*p.a.live, p.a.num_rows);
  if (static_cast<int>(blockIdx.y) * kGdnChunk >= num_live) return;
  PrepareRows<kDim>(p, num_live, shared);
  __syncthreads();
  MultiplyKeys<kDim>(shared);
  const int heads = static_cast<int>(p.a.value_heads / p.a.key_heads);
  for (int first = 0; first < heads; first += kHeadsAtOnce) {
    PrepareHeads<kDim>(p, first, num_live, shared);
  }
}

}  // namespace strata::gdn
