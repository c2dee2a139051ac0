// gdn_chunk on the device: the contract of gdn_window for tiles, as products over chunks of rows.
//
// Three kernels. The first works on all chunks of 64 rows at once: convolution, norms, gates, and
// of each chunk the products k k^T and q k^T and the inverse of its triangular system. The second
// walks from chunk to chunk with the state in registers; a warp has 16 value columns of a head,
// which know nothing of the others. The third is the gated norm. Source: Yang et al. 2024,
// "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", sections 3.2
// and 3.3, with the decays of "Gated Delta Networks"; model.md, section 3.
//
// Chunks lie on multiples of 64 from row 0, dead rows are zeros that change no bit, and nothing
// else depends on the number of rows: a tile may start at any chunk (numerics.md, contract C).
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "cuda/ops/gdn_window.h"

namespace strata {

struct GdnChunkArgs {
  GdnWindowArgs window;      // num_rows: a multiple of kGdnChunk
  unsigned char* workspace;  // [GdnChunkWorkspace bytes], 16-byte aligned
};

inline constexpr int kGdnChunk = 64;

// Whether the kernels here know the sizes. Others go row after row, by gdn_window's kernel.
bool HasGdnChunk(int64_t num_taps, int64_t value_heads, int64_t head_dim);

int64_t GdnChunkWorkspace(int64_t num_rows, int64_t key_heads, int64_t value_heads,
                          int64_t head_dim);

std::string GdnChunk(const GdnChunkArgs& args, cudaStream_t stream);

}  // namespace strata
