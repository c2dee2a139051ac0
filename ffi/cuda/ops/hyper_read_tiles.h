// hyper_read for tiles of a prompt, on matrix units (hyper_read_tiles.cu).
#pragma once

#include "cuda/ops/hyper_read.h"

namespace strata {

// Whether these kernels know the sizes and types of a call. Others go eight rows at a time.
bool HasHyperReadTiles(const HyperReadArgs& args);

int64_t HyperReadTilesWorkspace(int64_t num_rows, int64_t num_streams, int64_t rank);

std::string HyperReadTiles(const HyperReadArgs& args, cudaStream_t stream);

}  // namespace strata
