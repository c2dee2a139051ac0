#include "cuda/ops/embed_rows.h"
#include "cuda/products.cuh"

namespace strata {
namespace {

constexpr int kThreads = 64;  // a segment of the row for each block, four values a thread

__global__ void __launch_bounds__(kThreads)
    EmbedRowsKernel(const __grid_constant__ PanelMatrix table, const int32_t* ids,
                    const int32_t* live, float* out) {
  const int column = (blockIdx.x * kThreads + threadIdx.x) * 4;
  if (column >= table.cols) return;
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int64_t row = blockIdx.y;
  const int id = ids[row];
  // An id outside the table is refused by the engine; here it must not read foreign memory.
  if (row < *live && id >= 0 && id < table.rows) {
    const uint8_t* unit = table.bytes + id / 32 * table.panel_bytes +
                          static_cast<int64_t>(blockIdx.x) * table.unit_bytes;
    const int blocks = min(8, table.cols / 32 - static_cast<int>(blockIdx.x) * 8);
    values = FourOfSegment(table.type, unit, id % 32, blocks, threadIdx.x);
  }
  *reinterpret_cast<float4*>(out + row * table.cols + column) = values;
}

}  // namespace

std::string EmbedRows(const EmbedRowsArgs& args, cudaStream_t stream) {
  Shape launch;
  launch.grid = dim3(static_cast<unsigned>((args.table->cols + 4 * kThreads - 1) / (4 * kThreads)),
                     static_cast<unsigned>(args.num_rows));
  launch.block = dim3(kThreads);
  launch.stream = stream;
  return Launch(EmbedRowsKernel, launch, ViewOf(*args.table), args.ids, args.live, args.out);
}

}  // namespace strata
