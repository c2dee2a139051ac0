#include "cuda/activations.cuh"
#include "cuda/reduce.cuh"
#include "cuda/tile_rows.h"

namespace strata::tiles {
namespace {

constexpr int kWarps = 8;

// A warp quantises four blocks of a row, a quad.
__global__ void __launch_bounds__(kWarps * 32)
    QuantizeKernel(const float* x, const int32_t* live, int num_rows, int width, QuantizedRows to) {
  const int row = blockIdx.x;
  const int quad = blockIdx.y * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= LiveRows(*live, num_rows) || quad * kQuad >= width) return;
  const QuantizedQuad q =
      QuantizeQuad(LoadQuad(x + row * static_cast<int64_t>(width), width, quad, lane));
  const int64_t value = row * to.values + quad * kQuad + 4 * lane;
  *reinterpret_cast<uint32_t*>(to.codes + value) = q.codes;
  if (lane % 8 == 0) to.scales[value / 32] = q.scale;
  if (lane % 4 == 0) to.sums[value / 16] = __int2float_rn(q.half_sum);
}

}  // namespace

QuantizedRows QuantizedRows::At(unsigned char* at, int64_t rows, int64_t width) {
  const int64_t values = Values(width);
  const int64_t all = RoundUp(rows, kRowsPadding) * values;
  return {reinterpret_cast<int8_t*>(at), reinterpret_cast<float*>(at + all),
          reinterpret_cast<float*>(at + all + all / 8), values};
}

std::string QuantizeTileRows(const float* x, const int32_t* live, int64_t num_rows, int64_t width,
                             const QuantizedRows& to, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(num_rows),
                    static_cast<unsigned>((width + kQuad * kWarps - 1) / (kQuad * kWarps)));
  shape.block = dim3(kWarps * 32);
  shape.stream = stream;
  return Launch(QuantizeKernel, shape, x, live, static_cast<int>(num_rows), static_cast<int>(width),
                to);
}

}  // namespace strata::tiles
