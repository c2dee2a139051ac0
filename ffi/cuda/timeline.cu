#include <algorithm>
#include <stdexcept>

#include "cuda/system_scope.cuh"
#include "cuda/timeline.h"

namespace strata {
namespace {

__global__ void MarkKernel(TimelineAt timeline, uint64_t phase) {
  const uint32_t place = (*timeline.count)++;  // kernels of one stream follow one another
  if (place < timeline.capacity) timeline.marks[place] = {NowNs(), phase};
}

}  // namespace

std::string Mark(const TimelineAt& timeline, int64_t phase, cudaStream_t stream) {
  if (timeline.marks == nullptr) return "";
  Shape shape;
  shape.grid = dim3(1);
  shape.block = dim3(1);
  shape.stream = stream;
  return Launch(MarkKernel, shape, timeline, static_cast<uint64_t>(phase));
}

Timeline::Timeline(int64_t capacity) {
  at_.capacity = static_cast<uint32_t>(capacity);
  const auto bytes = static_cast<size_t>(capacity) * sizeof(MarkEntry);
  cudaError_t error = cudaMalloc(&at_.marks, bytes);
  if (error == cudaSuccess) error = cudaMalloc(&at_.count, sizeof(uint32_t));
  if (error == cudaSuccess) error = cudaMemset(at_.count, 0, sizeof(uint32_t));
  if (error != cudaSuccess) {
    cudaFree(at_.marks);
    cudaFree(at_.count);
    throw std::runtime_error(std::string("timeline: ") + cudaGetErrorString(error));
  }
}

Timeline::~Timeline() {
  cudaFree(at_.marks);
  cudaFree(at_.count);
}

std::vector<std::pair<uint64_t, uint64_t>> Timeline::Take() {
  uint32_t count = 0;
  cudaDeviceSynchronize();
  cudaMemcpy(&count, at_.count, sizeof(count), cudaMemcpyDeviceToHost);
  cudaMemset(at_.count, 0, sizeof(count));
  std::vector<MarkEntry> marks(std::min(count, at_.capacity));
  if (!marks.empty()) {
    cudaMemcpy(marks.data(), at_.marks, marks.size() * sizeof(MarkEntry), cudaMemcpyDeviceToHost);
  }
  std::vector<std::pair<uint64_t, uint64_t>> taken;
  for (const MarkEntry& mark : marks) taken.emplace_back(mark.at_ns, mark.phase);
  return taken;
}

}  // namespace strata
