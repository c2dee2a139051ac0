// The two kernels of expert_ffn_tiles.cu that multiply, each in a file of its own: they are built
// for many types.
#pragma once

#include "cuda/ops/expert_ffn_tiles.cuh"
#include "cuda/ops/expert_gate.h"

namespace strata::expert_tiles {

// The launch for a group of routed experts that lie at `experts`.
inline TileParams RoutedParams(TileParams p, const ExpertShape& shape, const uint64_t* experts,
                               const GroupRange& group, bool is_only, bool down) {
  p.experts = experts;
  p.first = ViewOf(down ? shape.down : shape.gate);
  p.first_at = down ? shape.down_at : 0;
  p.second = ViewOf(shape.up);
  p.second_at = shape.up_at;
  p.first_tile = is_only ? nullptr : p.groups.first_tiles + group.first;
  p.end_tile = p.groups.first_tiles + group.end;
  return p;
}

// For at most `tiles` tiles: a block for each part of one and 64 hidden values, or 128 columns, or
// blocks that share all of them (expert_wide_tiles.h).
std::string LaunchGateUp(const TileParams& p, int64_t tiles, cudaStream_t stream);
std::string LaunchDown(const TileParams& p, int64_t tiles, cudaStream_t stream);

template <typename Weights>
std::string LaunchTiles(void (*kernel)(TileParams), const TileParams& p, int64_t columns,
                        int64_t tiles, cudaStream_t stream) {
  Shape shape;
  const int64_t parts = p.experts == nullptr ? 1 : (p.groups.tile_rows - 1) / kTileRows + 1;
  shape.grid = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(tiles),
                    static_cast<unsigned>(parts));
  shape.block = dim3(kThreads);
  shape.shared_bytes = static_cast<size_t>(SharedBytes<Weights>());
  shape.stream = stream;
  return Launch(kernel, shape, p);
}

}  // namespace strata::expert_tiles
