#include "cuda/peer_branch.h"

#include <stdexcept>

#include "cuda/current_device.h"

namespace strata {

PeerBranch::PeerBranch(const char* where, int device, int64_t bytes)
    : where_(where), device_(device) {
  const std::string error = Allocate(bytes);
  if (error.empty()) return;
  Release();
  throw std::runtime_error(error);
}

PeerBranch::~PeerBranch() { Release(); }

std::string PeerBranch::Failed(const std::string& what, cudaError_t error) const {
  return std::string(where_) + ": " + what + ": " + cudaGetErrorString(error);
}

std::string PeerBranch::Short(const std::string& what, int64_t bytes, cudaError_t error) const {
  size_t free_bytes = 0, total = 0;
  int device = 0;
  cudaGetDevice(&device);
  cudaMemGetInfo(&free_bytes, &total);
  return std::string(where_) + ": " + what + " of " + std::to_string(bytes >> 20) +
         " MiB failed (" + cudaGetErrorString(error) + "); device " + std::to_string(device) +
         " has " + std::to_string(free_bytes >> 20) + " of " + std::to_string(total >> 20) +
         " MiB free";
}

std::string PeerBranch::Allocate(int64_t bytes) {
  cudaError_t error = cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming);
  if (error != cudaSuccess) return Failed("an event", error);
  const CurrentDevice current(device_);
  if (!current.problem().empty()) return std::string(where_) + ": " + current.problem();
  error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&join_, cudaEventDisableTiming);
  if (error != cudaSuccess) return Failed("a stream", error);
  error = cudaMalloc(&memory_, bytes);
  return error == cudaSuccess ? "" : Short("the workspace", bytes, error);
}

void PeerBranch::Release() {
  {
    const CurrentDevice current(device_);
    if (current.problem().empty()) {
      cudaDeviceSynchronize();  // a step may still be in flight
      if (join_ != nullptr) cudaEventDestroy(join_);
      if (stream_ != nullptr) cudaStreamDestroy(stream_);
      cudaFree(memory_);
    }
  }
  if (fork_ != nullptr) cudaEventDestroy(fork_);
}

std::string PeerBranch::Fork(cudaStream_t stream) {
  cudaError_t error = cudaEventRecord(fork_, stream);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, fork_, 0);
  return error == cudaSuccess ? "" : Failed("the fork", error);
}

std::string PeerBranch::End() {
  const std::string problem = Mark(PeerPhase::kIdle);
  if (!problem.empty()) return problem;
  const cudaError_t error = cudaEventRecord(join_, stream_);
  return error == cudaSuccess ? "" : Failed("the join", error);
}

std::string PeerBranch::Join(cudaStream_t stream) {
  const cudaError_t error = cudaStreamWaitEvent(stream, join_, 0);
  return error == cudaSuccess ? "" : Failed("the join", error);
}

std::string PeerBranch::Mark(PeerPhase phase) const {
  return strata::Mark(timeline_, static_cast<int64_t>(phase), stream_);
}

}  // namespace strata
