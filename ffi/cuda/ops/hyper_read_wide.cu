#include "cuda/group_units.h"
#include "cuda/ops/hyper_read_wide.h"
#include "cuda/ops/hyper_read_wide_up.cuh"

namespace strata::hyper {
namespace {

Shape ShapeOf(unsigned blocks, int threads, size_t shared_bytes, cudaStream_t stream) {
  return {dim3(blocks), dim3(static_cast<unsigned>(threads)), shared_bytes, stream};
}

template <int kRank>
std::string LaunchRank(const TileParams& p, cudaStream_t stream) {
  Shape down = ShapeOf(kStreams, kWideDownThreads, DownLayout<kRank>::Bytes(p.width), stream);
  down.grid.y = static_cast<unsigned>((p.num_rows + kWideDownRows - 1) / kWideDownRows);
  std::string error = Launch(WideDownKernel<kRank>, down, p);
  if (!error.empty()) return error;
  const Shape join =
      ShapeOf(static_cast<unsigned>(p.num_rows / kJoinRows), kWideJoinThreads, 0, stream);
  error = Launch(WideJoinKernel, join, p);
  if (!error.empty()) return error;
  const Shape up = ShapeOf(static_cast<unsigned>(Multiprocessors()), kWideUpThreads,
                           UpLayout<kRank>::kBytes, stream);
  return Launch(WideUpKernel<kRank>, up, p);
}

}  // namespace

bool HasWideHyperRead(int64_t rank) { return (rank == 64 || rank == 320) && HasGroupUnits(); }

std::string LaunchWideHyperRead(const TileParams& p, cudaStream_t stream) {
  return p.rank == 64 ? LaunchRank<64>(p, stream) : LaunchRank<320>(p, stream);
}

}  // namespace strata::hyper
