// gdn_chunk's second kernel: from chunk to chunk with the state in registers.
//
// A warp has 16 value columns of a head and computes everything transposed: the state S^T
// [16, C], and of a chunk k S, the new values and the results as [16, 64]. As accumulators of
// one product they are the left operand of the next without leaving their registers; the right
// operands, which all warps of a block share, pass through a ring in shared memory in the order
// of their use. With X = diag(beta) (V - diag(e^c) K S):
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
inline constexpr int kSlots = 6;                      // of the ring

struct alignas(16) ScanShared {
  unsigned char ring[kSlots][kPieceBytes];
  float gates[2][kGateFloats];  // of the chunk that is computed and of the next
};

// The pieces of all chunks: K, inverse, Q, weights and K again.
template <int kDim>
class Pieces {
  static constexpr int kOfKeys = kDim / 64;
  static constexpr int kPerChunk = 3 * kOfKeys + 2;
  static_assert(kPerChunk >= kSlots - 1, "the ring may reach into one chunk after this only");

 public:
  __device__ Pieces(const ChunkParams& p, int head, int num_chunks, ScanShared* shared)
      : p_(p), shared_(shared), head_(head), num_chunks_(num_chunks) {
    for (int i = 0; i < kSlots - 1; ++i) Begin();
  }

  // The next piece, once every thread is done with the one before.
  __device__ const unsigned char* Next() {
    WaitForGroups<kSlots - 2>();
    __syncthreads();
    Begin();
    const unsigned char* piece = shared_->ring[slot_];
    slot_ = slot_ + 1 == kSlots ? 0 : slot_ + 1;
    return piece;
  }

 private:
  __device__ void Begin() {
    if (chunk_ < num_chunks_) {
      const unsigned char* from = Source();
      unsigned char* to = shared_->ring[begun_slot_];
#pragma unroll
      for (int at = threadIdx.x * 16; at < kPieceBytes; at += kScanWarps * 32 * 16) {
        CopyAsync(to + at, from + at, true);
      }
      if (piece_ == 0 && threadIdx.x < kGateFloats / 4) {
        const int value_heads = static_cast<int>(p_.a.value_heads);
        const float* gates = p_.gates + (chunk_ * value_heads + head_) * kGateFloats;
        CopyAsync(shared_->gates[chunk_ % 2] + threadIdx.x * 4, gates + threadIdx.x * 4, true);
      }
    }
    EndCopyGroup();
    begun_slot_ = begun_slot_ + 1 == kSlots ? 0 : begun_slot_ + 1;
    if (++piece_ == kPerChunk) {
      piece_ = 0;
      ++chunk_;
    }
  }

  __device__ const unsigned char* Source() const {
    const int key_heads = static_cast<int>(p_.a.key_heads);
    const int value_heads = static_cast<int>(p_.a.value_heads);
    const auto of_values = [&](const unsigned char* pieces) {
      return pieces + static_cast<int64_t>(chunk_ * value_heads + head_) * kPieceBytes;
    };
    const auto of_keys = [&](const unsigned char* pieces, int i) {
      const int64_t first = (chunk_ * key_heads + head_ % key_heads) * kOfKeys;
      return pieces + (first + i) * kPieceBytes;
    };
    if (piece_ < kOfKeys) return of_keys(p_.keys, piece_);
    if (piece_ == kOfKeys) return of_values(p_.inverse);
    if (piece_ <= 2 * kOfKeys) return of_keys(p_.queries, piece_ - kOfKeys - 1);
    if (piece_ == 2 * kOfKeys + 1) return of_values(p_.weights);
    return of_keys(p_.keys, piece_ - 2 * kOfKeys - 2);
  }

  const ChunkParams& p_;
  ScanShared* shared_;
  int head_;
  int num_chunks_;
  int chunk_ = 0, piece_ = 0;  // to be copied next
  int begun_slot_ = 0, slot_ = 0;
};

// to += S^T piece^T over a piece's 64 key columns, whose tiles of the state these are.
__device__ __forceinline__ void MultiplyState(const unsigned char* piece, const float (*state)[4],
                                              float (&to)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const SplitA a = SplitTiles(state[2 * step], state[2 * step + 1]);
    uint32_t b[8][4];
    LoadRowTiles<8>(piece, step, 0, b);
    MultiplySplit<8>(a, b, to);
  }
}

// to += rows piece^T, the piece lower triangular: tiles above its diagonal are left out.
__device__ __forceinline__ void MultiplyLower(const unsigned char* piece, const SplitA (&rows)[4],
                                              float (&to)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int first = 2 * step; first < 8; first += 2) {
      uint32_t b[2][4];
      LoadRowTiles<2>(piece, step, first, b);
      MultiplySplit<2>(rows[step], b, to + first);
    }
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

template <int kDim>
__global__ void __launch_bounds__(kScanWarps * 32)
    GdnScanKernel(const __grid_constant__ ChunkParams p) {
  STRATA_SHARED(ScanShared, shared);
  constexpr int kTiles = kDim / 8;
  const int lane = threadIdx.x % 32;
  const int head = blockIdx.x;
  const int column = blockIdx.y * kScanColumns + threadIdx.x / 32 * 16 + lane / 4;
  const int width = static_cast<int>(p.a.value_heads) * kDim;
  const int num_live = LiveRows(*p.a.live, p.a.num_rows);
  const int num_chunks = (num_live + kGdnChunk - 1) / kGdnChunk;
  const auto state_at = [&](int tile, int k) {
    const int key = tile * 8 + lane % 4 * 2 + k % 2;
    return (head * kDim + key) * kDim + column + k / 2 * 8;
  };
  float state[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) state[i][k] = p.a.state[state_at(i, k)];
  }
  Pieces<kDim> pieces(p, head, num_chunks, shared);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const float* gates = shared->gates[chunk % 2];
    float* y = p.a.y + chunk * kGdnChunk * width + head * kDim + column;
    float values[8][4];
    ForEachValue(values, [&](int row, int right, float* v) { *v = y[row * width + right]; });
    float rows[8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) MultiplyState(pieces.Next(), state + 8 * i, rows);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = i * 8 + lane % 4 * 2 + k % 2;
        const float recalled = gates[kFromStart * kGdnChunk + row] * rows[i][k];
        rows[i][k] = gates[kBeta * kGdnChunk + row] * (values[i][k] - recalled);
      }
    }
    SplitA split[4];
    SplitRows(rows, split);
    float fresh[8][4] = {};
    MultiplyLower(pieces.Next(), split, fresh);
    float out[8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) MultiplyState(pieces.Next(), state + 8 * i, out);
    ForEachValue(out, [&](int row, int, float* v) { *v *= gates[kFromStart * kGdnChunk + row]; });
    SplitRows(fresh, split);
    MultiplyLower(pieces.Next(), split, out);
    ForEachValue(out, [&](int row, int right, float* v) { y[row * width + right] = *v; });
    ForEachValue(fresh, [&](int row, int, float* v) { *v *= gates[kToEnd * kGdnChunk + row]; });
    SplitRows(fresh, split);
    const float decay = gates[kFromStart * kGdnChunk + kGdnChunk - 1];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) state[i][k] *= decay;
    }
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
      const unsigned char* piece = pieces.Next();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t b[8][4];
        LoadColumnTiles<8>(piece, step, 0, b);
        MultiplySplit<8>(split[step], b, state + 8 * i);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) p.a.new_state[state_at(i, k)] = state[i][k];
  }
}

}  // namespace strata::gdn
