#include <algorithm>

#include "cuda/peer_pull.h"
#include "cuda/reduce.cuh"
#include "cuda/system_scope.cuh"

namespace strata {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 264;  // two for each of a large card's multiprocessors
constexpr int kInFlight = 4;          // loads of a thread: the other memory is far away

struct PullParams {
  PullPiece pieces[kMostPulls];
  PullNumbers n;
  int32_t num_pieces;
};

__device__ __forceinline__ void CopyWide(const uint4* from, uint4* to, int64_t chunks, int first,
                                         int step) {
  for (int64_t i = first; i < chunks; i += static_cast<int64_t>(step) * kInFlight) {
    uint4 held[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + static_cast<int64_t>(k) * step;
      if (at < chunks) held[k] = LoadThere(from + at);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + static_cast<int64_t>(k) * step;
      if (at < chunks) to[at] = held[k];
    }
  }
}

__global__ void __launch_bounds__(kThreads) PullKernel(const __grid_constant__ PullParams p) {
  const int first = blockIdx.x * kThreads + threadIdx.x;
  const int step = gridDim.x * kThreads;
  const int live = LiveRows(ReadThere(p.n.live), p.n.num_rows);
  const int rows = max(live - static_cast<int>(p.n.first_row), 0);
  int cells = 0;
  if (p.n.pos != nullptr) {
    const int pos = ReadThere(p.n.pos);
    cells = rows == 0 ? 0 : min(pos + live, static_cast<int>(p.n.num_cells));
    if (first == 0) *p.n.peers_pos = pos + static_cast<int>(p.n.first_row);
  }
  if (first == 0) *p.n.peers_live = rows;
  for (int i = 0; i < p.num_pieces; ++i) {
    const PullPiece& piece = p.pieces[i];
    int64_t count = piece.count == PullCount::kRows ? rows : cells;
    if (piece.count == PullCount::kAll) count = piece.unit_rows;
    const int64_t bytes = (count + piece.unit_rows - 1) / piece.unit_rows * piece.unit_bytes;
    const auto both = reinterpret_cast<uint64_t>(piece.from) | reinterpret_cast<uint64_t>(piece.to);
    if (both % 16 == 0) {
      CopyWide(static_cast<const uint4*>(piece.from), static_cast<uint4*>(piece.to),
               (bytes + 15) / 16, first, step);
      continue;
    }
    for (int64_t word = first; word < bytes / 4; word += step) {
      static_cast<uint32_t*>(piece.to)[word] =
          ReadThere(static_cast<const uint32_t*>(piece.from) + word);
    }
  }
}

}  // namespace

std::string Pull(const std::vector<PullPiece>& pieces, const PullNumbers& numbers,
                 cudaStream_t stream) {
  if (pieces.size() > kMostPulls) return "pull: too many pieces";
  int64_t bytes = 0;  // at most
  for (const PullPiece& piece : pieces) {
    const int64_t most[] = {piece.unit_rows, numbers.num_rows, numbers.num_cells};
    bytes += most[static_cast<int>(piece.count)] / piece.unit_rows * piece.unit_bytes;
  }
  PullParams p = {};
  std::copy(pieces.begin(), pieces.end(), p.pieces);
  p.n = numbers;
  p.num_pieces = static_cast<int32_t>(pieces.size());
  Shape shape;
  const int64_t blocks = bytes / (16 * kThreads * kInFlight) + 1;
  shape.grid = dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks)));
  shape.block = dim3(kThreads);
  shape.stream = stream;
  return Launch(PullKernel, shape, p);
}

}  // namespace strata
