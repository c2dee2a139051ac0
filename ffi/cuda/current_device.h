// The device that CUDA's calls of this thread are about, for a while.
#pragma once

#include <string>

#include "cuda/launch.h"

namespace strata {

class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&before_);
    error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // Why it is not to be had; empty if it is.
  std::string problem() const {
    return error_ == cudaSuccess ? "" : std::string("a device: ") + cudaGetErrorString(error_);
  }

 private:
  int before_ = 0;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace strata
