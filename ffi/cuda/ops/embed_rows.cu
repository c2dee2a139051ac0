#include "cuda/ops/embed_rows.h"
#include "cuda/products.cuh"

namespace strata {
namespace {

constexpr int kThreads = 256;  // a segment of the row for each block

__global__ void EmbedRowsKernel(const __grid_constant__ PanelMatrix table, const int32_t* ids,
                                const int32_t* live, float* out) {
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= table.cols) return;
  float value = 0.0f;
  const int64_t row = blockIdx.y;
  // An id outside the table is refused by the engine; here it must not read foreign memory.
  if (row < *live && ids[row] >= 0 && ids[row] < table.rows) {
    const int id = ids[row];
    const uint8_t* unit = table.bytes + id / 32 * table.panel_bytes +
                          static_cast<int64_t>(blockIdx.x) * table.unit_bytes;
    const int blocks = min(8, table.cols / 32 - static_cast<int>(blockIdx.x) * 8);
    value = SegmentValue(table.type, unit, id % 32, blocks, threadIdx.x);
  }
  out[row * table.cols + column] = value;
}

}  // namespace

std::string EmbedRows(const EmbedRowsArgs& args, cudaStream_t stream) {
  Shape launch;
  launch.grid = dim3(static_cast<unsigned>((args.table->cols + kThreads - 1) / kThreads),
                     static_cast<unsigned>(args.num_rows));
  launch.block = dim3(kThreads);
  launch.stream = stream;
  return Launch(EmbedRowsKernel, launch, ViewOf(*args.table), args.ids, args.live, args.out);
}

}  // namespace strata
