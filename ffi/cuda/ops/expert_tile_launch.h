// The two kernels of expert_ffn_tiles.cu that multiply, each in a file of its own: they are built
// for many types.
#pragma once

#include "cuda/ops/expert_ffn_tiles.cuh"

namespace strata::expert_tiles {

// A block for each of `tiles` tiles and 64 hidden values, or 128 columns.
std::string LaunchGateUp(const TileParams& p, int64_t tiles, cudaStream_t stream);
std::string LaunchDown(const TileParams& p, int64_t tiles, cudaStream_t stream);

template <typename Weights>
std::string LaunchTiles(void (*kernel)(TileParams), const TileParams& p, int64_t columns,
                        int64_t tiles, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(tiles));
  shape.block = dim3(kThreads);
  shape.shared_bytes = static_cast<size_t>(SharedBytes<Weights>());
  shape.stream = stream;
  return Launch(kernel, shape, p);
}

}  // namespace strata::expert_tiles
