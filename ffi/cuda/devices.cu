#include <cuda_runtime.h>

#include <sstream>

#include "cuda/devices.h"
#include "cuda/peer_access.h"

namespace strata {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;

// Never launched: asking for its attributes loads the build's code for a device, or says there is
// none.
__global__ void ProbeKernel() {}

std::string Join(const std::vector<std::string>& words) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : " ") + word;
  return joined;
}

// Why the device cannot run this build's code; empty if it can. The device must be current.
std::string ProbeCode(const CudaDevice& device) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, ProbeKernel);
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // what was answered is no error of a later call
  if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction) {
    return cudaGetErrorString(status);
  }
  const std::string arch = std::to_string(device.major) + std::to_string(device.minor);
  return "this build has code for " + Join(BuiltArchs()) + ", the device is sm_" + arch +
         "; build with -DSTRATA_CUDA_ARCHS=" + arch;
}

CudaDevice ExamineDevice(int index) {
  CudaDevice device;
  device.index = index;
  cudaDeviceProp properties;
  if (const cudaError_t status = cudaGetDeviceProperties(&properties, index);
      status != cudaSuccess) {
    device.problem = cudaGetErrorString(status);
    return device;
  }
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.total_mib = static_cast<int64_t>(properties.totalGlobalMem) / kMib;
  char pci_id[32] = "";
  cudaDeviceGetPCIBusId(pci_id, sizeof(pci_id), index);
  device.pci_id = pci_id;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) status = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (status != cudaSuccess) {
    cudaGetLastError();
    device.problem = cudaGetErrorString(status);
    return device;
  }
  device.free_mib = static_cast<int64_t>(free_bytes) / kMib;
  device.problem = ProbeCode(device);
  return device;
}

std::string Dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why the runtime finds no device.
std::string NoDevice(cudaError_t status, const CudaMachine& machine) {
  if (machine.driver_version == 0) return "no NVIDIA driver (libcuda.so.1) is installed";
  if (status == cudaErrorInsufficientDriver) {
    return "the driver runs CUDA up to " + Dotted(machine.driver_version) + ", this build needs " +
           Dotted(machine.runtime_version) + "; update the driver";
  }
  if (status == cudaSuccess || status == cudaErrorNoDevice) {
    return "the driver shows this process no device";
  }
  return cudaGetErrorString(status);
}

}  // namespace

std::vector<std::string> BuiltArchs() {
  std::vector<std::string> archs;
  std::istringstream list(STRATA_BUILT_ARCHS);  // CMake's words: 90-real, 120-virtual, 120 for both
  for (std::string word; std::getline(list, word, ',');) {
    const std::string number = word.substr(0, word.find('-'));
    if (word.find("-virtual") == std::string::npos) archs.push_back("sm_" + number);
    if (word.find("-real") == std::string::npos) archs.push_back("compute_" + number);
  }
  return archs;
}

CudaMachine ExamineMachine() {
  CudaMachine machine;
  // Without a driver this fails and leaves 0, which says so.
  cudaDriverGetVersion(&machine.driver_version);
  cudaRuntimeGetVersion(&machine.runtime_version);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    machine.problem = NoDevice(status, machine);
    return machine;
  }
  int current = 0;
  cudaGetDevice(&current);
  for (int index = 0; index < count; ++index) machine.devices.push_back(ExamineDevice(index));
  for (CudaDevice& device : machine.devices) {
    for (int peer = 0; peer < count; ++peer) {
      if (peer == device.index || !device.problem.empty()) continue;
      if (EnablePeerAccess(device.index, peer).empty()) device.peers.push_back(peer);
    }
  }
  cudaSetDevice(current);
  return machine;
}

}  // namespace strata
