// gdn_chunk's second kernel: from chunk to chunk with the state in registers.
//
// A warp has 16 value columns of a head and computes everything transposed: the state S^T
// [16, C], and of a chunk k S, the new values and the results as [16, 64]. As accumulators of
// one product they are the left operand of the next without leaving their registers; the right
// operands, which all warps of a block share, are copied to shared memory ahead of their use. With
// X = diag(beta) (V - diag(e^c) K S):
//
//   V' = (I + A)^-1 X       O = diag(e^c) Q S + weights V'
//   S <- e^(c of the last row) S + K^T diag(e^(c of the last row - c)) V'
//
// which is model.md's chunk form with V' = U - W S multiplied out: one product more in here, two
// and their memory less before.
#pragma once

#include "cuda/ops/gdn_chunk_parts.cuh"

namespace strata::gdn {

inline constexpr int kScanWarps = 4;
inline constexpr int kScanColumns = 16 * kScanWarps;  // of a block

template <int kDim>
struct alignas(16) ScanShared {
  unsigned char keys[2][kDim / 64 * kPieceBytes];  // K and Q of a chunk, the other way in the next
  unsigned char inverse[kPieceBytes];
  unsigned char weights[kPieceBytes];
  float gates[2][kGateFloats];  // of the chunk that is computed and of the next
};

// What the second kernel reads, chunk by chunk. A copy begins as soon as every thread is done with
// what lay in its place: Q where K of the chunk before was, K of the next where Q was.
template <int kDim>
class ChunkCopies {
 public:
  __device__ ChunkCopies(const ChunkParams& p, int head, int num_chunks, ScanShared<kDim>* shared)
      : p_(p), shared_(shared), head_(head), num_chunks_(num_chunks) {}

  __device__ void BeginKeys(int chunk) const {
    if (chunk >= num_chunks_) return;
    Copy(p_.keys + OfKeys(chunk), shared_->keys[chunk % 2], sizeof(shared_->keys[0]));
    const float* gates = p_.gates + (chunk * ValueHeads() + head_) * kGateFloats;
    Copy(gates, shared_->gates[chunk % 2], sizeof(shared_->gates[0]));
  }
  __device__ void BeginQueries(int chunk) const {
    Copy(p_.queries + OfKeys(chunk), shared_->keys[1 - chunk % 2], sizeof(shared_->keys[0]));
  }
  __device__ void BeginInverse(int chunk) const {
    if (chunk >= num_chunks_) return;
    Copy(p_.inverse + OfValues(chunk), shared_->inverse, kPieceBytes);
  }
  __device__ void BeginWeights(int chunk) const {
    Copy(p_.weights + OfValues(chunk), shared_->weights, kPieceBytes);
  }

 private:
  __device__ int ValueHeads() const { return static_cast<int>(p_.a.value_heads); }
  __device__ int64_t OfKeys(int chunk) const {
    const int key_heads = static_cast<int>(p_.a.key_heads);
    return static_cast<int64_t>(chunk * key_heads + head_ % key_heads) * (kDim / 64 * kPieceBytes);
  }
  __device__ int64_t OfValues(int chunk) const {
    return static_cast<int64_t>(chunk * ValueHeads() + head_) * kPieceBytes;
  }
  __device__ static void Copy(const void* from, void* to, int bytes) {
    for (int at = threadIdx.x * 16; at < bytes; at += kScanWarps * 32 * 16) {
      CopyAsync(static_cast<unsigned char*>(to) + at, static_cast<const unsigned char*>(from) + at,
                true);
    }
  }

  const ChunkParams& p_;
  ScanShared<kDim>* shared_;
  int head_;
  int num_chunks_;
};

// The thread's copies have arrived, and after the barrier everybody's.
__device__ __forceinline__ void Arrive() {
  WaitForCopies();
  __syncthreads();
}

// to += S^T B^T, B the pieces of K or Q. Tiles of the next product are loaded before those at hand
// are multiplied.
template <int kDim>
__device__ __forceinline__ void MultiplyState(const unsigned char* pieces, const float (*state)[4],
                                              float (&to)[8][4]) {
  uint32_t b[2][4][4];
  LoadRowTiles<4>(pieces, 0, 0, b[0]);
  SplitA a;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    const int step = i / 2;
    if (i % 2 == 0) a = SplitTiles(state[2 * step], state[2 * step + 1]);
    if (i + 1 < kDim / 8) {
      const int next = (i + 1) / 2;
      LoadRowTiles<4>(pieces + next / 4 * kPieceBytes, next % 4, (i + 1) % 2 * 4, b[(i + 1) % 2]);
    }
    MultiplySplit<4>(a, b[i % 2], to + i % 2 * 4);
  }
}

// to += rows B^T, B a lower triangular piece: tiles above its diagonal are left out.
__device__ __forceinline__ void MultiplyLower(const unsigned char* piece, const SplitA (&rows)[4],
                                              float (&to)[8][4]) {
  constexpr int kPairs = 10;
  constexpr int kStep[kPairs] = {0, 0, 0, 0, 1, 1, 1, 2, 2, 3};
  constexpr int kFirst[kPairs] = {0, 2, 4, 6, 2, 4, 6, 4, 6, 6};
  constexpr int kAhead = 2;
  uint32_t b[kAhead + 1][2][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) LoadRowTiles<2>(piece, kStep[i], kFirst[i], b[i]);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int next = i + kAhead;
    if (next < kPairs) LoadRowTiles<2>(piece, kStep[next], kFirst[next], b[next % (kAhead + 1)]);
    MultiplySplit<2>(rows[kStep[i]], b[i % (kAhead + 1)], to + kFirst[i]);
  }
}

// state += rows B, B the pieces of K.
template <int kDim>
__device__ __forceinline__ void UpdateState(const unsigned char* pieces, const SplitA (&rows)[4],
                                            float (*state)[4]) {
  constexpr int kGroups = kDim / 32;  // of 4 tiles
  uint32_t b[2][4][4];
  LoadColumnTiles<4>(pieces, 0, 0, b[0]);
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) {
    if (i + 1 < 4 * kGroups) {
      const int group = (i + 1) % kGroups;
      LoadColumnTiles<4>(pieces + group / 2 * kPieceBytes, (i + 1) / kGroups, group % 2 * 4,
                         b[(i + 1) % 2]);
    }
    MultiplySplit<4>(rows[i / kGroups], b[i % 2], state + i % kGroups * 4);
  }
}

__device__ __forceinline__ void SplitRows(const float (&tiles)[8][4], SplitA (&to)[4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) to[step] = SplitTiles(tiles[2 * step], tiles[2 * step + 1]);
}

// Calls act(tile, column of the chunk's two, value) for the lane's values of [16, 64].
template <typename Act>
__device__ __forceinline__ void ForEachValue(float (&tiles)[8][4], const Act& act) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; ++k) act(row + k % 2, k / 2 * 8, &tiles[i][k]);
  }
}

// X in place of K S.
__device__ __forceinline__ void RecallRows(const float (&values)[8][4], const float* gates,
                                           float (&rows)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = i * 8 + threadIdx.x % 4 * 2 + k % 2;
      const float recalled = gates[kFromStart * kGdnChunk + row] * rows[i][k];
      rows[i][k] = gates[kBeta * kGdnChunk + row] * (values[i][k] - recalled);
    }
  }
}

// Calls act(place in the head's state, value) for the lane's values of it.
template <int kDim, typename Act>
__device__ __forceinline__ void ForEachState(int column, float (*state)[4], const Act& act) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    const int key = i * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; ++k) act((key + k % 2) * kDim + column + k / 2 * 8, &state[i][k]);
  }
}

template <int kDim>
__global__ void __launch_bounds__(kScanWarps * 32)
    GdnScanKernel(const __grid_constant__ ChunkParams p) {
  STRATA_SHARED(ScanShared<kDim>, shared);
  const int head = blockIdx.x;
  const int column = blockIdx.y * kScanColumns + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int width = static_cast<int>(p.a.value_heads) * kDim;
  const int num_live = LiveRows(*p.a.live, p.a.num_rows);
  const int num_chunks = (num_live + kGdnChunk - 1) / kGdnChunk;
  const ChunkCopies<kDim> copies(p, head, num_chunks, shared);
  copies.BeginInverse(0);
  copies.BeginKeys(0);
  const int state_at = head * kDim * kDim;
  float state[kDim / 8][4];
  ForEachState<kDim>(column, state, [&](int at, float* v) { *v = p.a.state[state_at + at]; });
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const float* gates = shared->gates[chunk % 2];
    const unsigned char* keys = shared->keys[chunk % 2];
    const unsigned char* queries = shared->keys[1 - chunk % 2];
    float* y = p.a.y + chunk * kGdnChunk * width + head * kDim + column;
    float values[8][4];
    ForEachValue(values, [&](int row, int right, float* v) { *v = y[row * width + right]; });
    Arrive();
    copies.BeginQueries(chunk);
    copies.BeginWeights(chunk);
    float rows[8][4] = {};
    MultiplyState<kDim>(keys, state, rows);
    RecallRows(values, gates, rows);
    SplitA split[4];
    SplitRows(rows, split);
    float fresh[8][4] = {};
    MultiplyLower(shared->inverse, split, fresh);
    Arrive();
    copies.BeginInverse(chunk + 1);
    float out[8][4] = {};
    MultiplyState<kDim>(queries, state, out);
    __syncthreads();
    copies.BeginKeys(chunk + 1);
    ForEachValue(out, [&](int row, int, float* v) { *v *= gates[kFromStart * kGdnChunk + row]; });
    SplitRows(fresh, split);
    MultiplyLower(shared->weights, split, out);
    ForEachValue(out, [&](int row, int right, float* v) { y[row * width + right] = *v; });
    ForEachValue(fresh, [&](int row, int, float* v) { *v *= gates[kToEnd * kGdnChunk + row]; });
    SplitRows(fresh, split);
    const float decay = gates[kFromStart * kGdnChunk + kGdnChunk - 1];
    ForEachState<kDim>(column, state, [&](int, float* v) { *v *= decay; });
    UpdateState<kDim>(keys, split, state);
  }
  ForEachState<kDim>(column, state, [&](int at, float* v) { p.a.new_state[state_at + at] = *v; });
}

}  // namespace strata::gdn
