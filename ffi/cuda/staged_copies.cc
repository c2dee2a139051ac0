#include "cuda/staged_copies.h"

#include <stdexcept>
#include <string>

#include "cuda/current_device.h"

namespace strata {

StagedCopies::StagedCopies(int from_device, int64_t most_bytes)
    : from_device_(from_device), most_bytes_((most_bytes + 255) / 256 * 256) {
  const cudaError_t error = Allocate(most_bytes);
  if (error == cudaSuccess) return;
  Release();
  throw std::runtime_error("staged_copies: page-locked memory of " +
                           std::to_string(kPieces * most_bytes_ >> 20) +
                           " MiB, or a stream: " + cudaGetErrorString(error));
}

StagedCopies::~StagedCopies() { Release(); }

cudaError_t StagedCopies::Allocate(int64_t most_bytes) {
  cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&memory_), kPieces * most_bytes_,
                                    cudaHostAllocPortable);
  const auto make = [&error](cudaEvent_t* event) {
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  };
  for (cudaEvent_t& event : emptied_) make(&event);
  const CurrentDevice current(from_device_);
  if (error == cudaSuccess && (most_bytes < 1 || !current.problem().empty())) {
    error = cudaErrorInvalidValue;
  }
  for (cudaEvent_t& event : filled_) make(&event);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&filling_, cudaStreamNonBlocking);
  return error;
}

void StagedCopies::Release() {
  for (cudaEvent_t event : emptied_) {
    if (event == nullptr) continue;
    cudaEventSynchronize(event);
    cudaEventDestroy(event);
  }
  const CurrentDevice current(from_device_);
  if (filling_ != nullptr) {
    cudaStreamSynchronize(filling_);
    cudaStreamDestroy(filling_);
  }
  for (cudaEvent_t event : filled_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaFreeHost(memory_);
}

cudaError_t StagedCopies::Copy(uint8_t* to, const uint8_t* from, int64_t bytes,
                               cudaStream_t stream) {
  if (bytes > most_bytes_) return cudaErrorInvalidValue;
  const int piece = next_;
  next_ = (next_ + 1) % kPieces;
  cudaError_t error = Fill(piece, from, bytes);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, filled_[piece], 0);
  if (error == cudaSuccess) {
    error =
        cudaMemcpyAsync(to, memory_ + piece * most_bytes_, bytes, cudaMemcpyHostToDevice, stream);
  }
  return error == cudaSuccess ? cudaEventRecord(emptied_[piece], stream) : error;
}

cudaError_t StagedCopies::Fill(int piece, const uint8_t* from, int64_t bytes) {
  const CurrentDevice current(from_device_);
  cudaError_t error = cudaStreamWaitEvent(filling_, emptied_[piece], 0);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(memory_ + piece * most_bytes_, from, bytes, cudaMemcpyDeviceToHost,
                            filling_);
  }
  return error == cudaSuccess ? cudaEventRecord(filled_[piece], filling_) : error;
}

}  // namespace strata
