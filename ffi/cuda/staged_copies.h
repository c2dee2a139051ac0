// Copies from the memory of a device that the current one does not reach: through pieces of
// page-locked memory of the host, so that both devices' links work at the same time.
//
// A piece is filled by a stream of the other device and emptied by the caller's. Order is kept by
// two events a piece: it is emptied behind the event that was recorded when it was filled, and
// filled again behind the one that was recorded when it was emptied. Nobody waits on the host.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/launch.h"

namespace strata {

class StagedCopies {
 public:
  // From memory of `from_device`, at most `most_bytes` at once. Throws std::runtime_error.
  StagedCopies(int from_device, int64_t most_bytes);
  ~StagedCopies();
  StagedCopies(const StagedCopies&) = delete;
  StagedCopies& operator=(const StagedCopies&) = delete;

  // Enqueues a copy to memory of the current device, on a stream of it: always the same one.
  cudaError_t Copy(uint8_t* to, const uint8_t* from, int64_t bytes, cudaStream_t stream);

 private:
  // Two would keep both links busy if every copy took as long as the one before.
  static constexpr int kPieces = 4;

  cudaError_t Fill(int piece, const uint8_t* from, int64_t bytes);
  cudaError_t Allocate(int64_t most_bytes);
  void Release();

  int from_device_;
  int64_t most_bytes_;
  uint8_t* memory_ = nullptr;
  cudaStream_t filling_ = nullptr;  // the other device's, as the first of the events
  std::array<cudaEvent_t, kPieces> filled_ = {};
  std::array<cudaEvent_t, kPieces> emptied_ = {};
  int next_ = 0;
};

}  // namespace strata
