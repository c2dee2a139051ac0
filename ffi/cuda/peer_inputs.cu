#include <algorithm>

#include "cuda/peer_inputs.h"
#include "cuda/reduce.cuh"
#include "cuda/system_scope.cuh"

namespace strata {
namespace {

constexpr int kThreads = 256;

__global__ void CopyInputsKernel(WindowInputs from, WindowRoom to, bool from_near, int num_rows,
                                 int num_active, int width) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i == 0) *to.live = ReadThere(from.live);
  const int rows = from_near ? LiveRows(*from.live, num_rows) : num_rows;
  if (i < rows * num_active) {
    const int id = from.ids == nullptr ? i : ReadThere(from.ids + i);
    if (id >= 0) to.words[i] = ReadThere(from.words + id);
  }
  if (i < rows * (width / 4)) {
    reinterpret_cast<uint4*>(to.x)[i] = LoadThere(reinterpret_cast<const uint4*>(from.x) + i);
  }
}

}  // namespace

std::string CopyInputs(const WindowInputs& from, bool from_near, const WindowRoom& to,
                       int64_t num_rows, int64_t num_active, int64_t width, cudaStream_t stream) {
  const int64_t threads = num_rows * std::max(num_active, width / 4);
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads));
  shape.block = dim3(kThreads);
  shape.stream = stream;
  return Launch(CopyInputsKernel, shape, from, to, from_near, static_cast<int>(num_rows),
                static_cast<int>(num_active), static_cast<int>(width));
}

}  // namespace strata
