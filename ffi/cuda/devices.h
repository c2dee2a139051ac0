// What the CUDA library can say about a machine before any model runs there.
//
// No driver, no device, or a device that this build has no code for is an answer, not an error.
// Looking creates the primary context of each device, which takes some of its memory until the
// process ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata {

struct CudaDevice {
  int index = 0;
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  std::string pci_id;
  int64_t total_mib = 0;
  int64_t free_mib = 0;
  std::string problem;     // why kernels of this build cannot run there; empty if they can
  std::vector<int> peers;  // devices whose memory its kernels reach
};

struct CudaMachine {
  int driver_version =
      0;  // newest CUDA the driver runs, 1000 * major + 10 * minor; 0 without a driver
  int runtime_version = 0;  // CUDA this library was built with, in the same way
  std::string problem;      // why there is no device; empty if there is one
  std::vector<CudaDevice> devices;
};

// Architectures in the build, as nvcc names them: sm_90 is machine code, compute_120 code for later
// devices, which the driver translates.
std::vector<std::string> BuiltArchs();

CudaMachine ExamineMachine();

}  // namespace strata
