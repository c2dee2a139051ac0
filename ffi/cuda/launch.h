// Starting kernels, on a GPU or, for tests on machines without one, emulated on the CPU.
//
// Every kernel of the project is launched here: the syntax of a launch is all that keeps a .cu file
// from being a C++ file. With STRATA_EMULATE the same sources are compiled by the host's compiler,
// and `cuda.h` of tests/native/emulate supplies what CUDA has beyond C++.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#if defined(STRATA_EMULATE)
#include "emulate/cuda.h"
#else
#include <cuda_runtime.h>
#endif

namespace strata {

struct Shape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
};

// Of the current device; 1 if it cannot be asked, for the launch will say what is wrong.
inline int Multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 1 ? count : 1;
}

// Shared memory that a block may have on the current device.
inline int MostSharedBytes() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 48 * 1024;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Of the current device: 90 for 9.0; 0 if it cannot be asked.
inline int ComputeCapability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

#if defined(__CUDACC__) || defined(STRATA_EMULATE)
// Enqueues a kernel; returns what is wrong, or an empty string. Legal while the stream is captured.
// `overlaps`: it may start while the kernel that the same call has enqueued before it still runs,
// for it waits in WaitForKernelBefore; cards without that feature start it afterwards.
template <typename... Parameters>
std::string LaunchOf(void (*kernel)(Parameters...), const Shape& shape, bool overlaps,
                     Parameters... arguments) {
#if defined(STRATA_EMULATE)
  (void)overlaps;
  if (!emulate::IsOnCurrentDevice(shape.stream)) return "a stream of another device";
  return emulate::Run([&] { kernel(arguments...); }, shape.grid, shape.block, shape.shared_bytes);
#else
  if (shape.shared_bytes > 48 * 1024) {
    // Above 48 KiB a kernel must be told; repeating it costs about a microsecond at capture only.
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps && ComputeCapability() >= 90 ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
#endif
}

template <typename... Parameters, typename... Arguments>
std::string Launch(void (*kernel)(Parameters...), const Shape& shape, Arguments... arguments) {
  return LaunchOf<Parameters...>(kernel, shape, false, arguments...);
}

template <typename... Parameters, typename... Arguments>
std::string LaunchOverlapping(void (*kernel)(Parameters...), const Shape& shape,
                              Arguments... arguments) {
  return LaunchOf<Parameters...>(kernel, shape, true, arguments...);
}

// Lets a kernel that LaunchOverlapping enqueues after this one begin.
__device__ __forceinline__ void LetNextKernelBegin() {
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before is over and what it wrote is there.
__device__ __forceinline__ void WaitForKernelBefore() {
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace strata

// The block's dynamic shared memory as `name`, a pointer to `type`, 16-byte aligned.
#if defined(STRATA_EMULATE)
#define STRATA_SHARED(type, name) type* name = reinterpret_cast<type*>(emulate::DynamicShared())
#else
#define STRATA_SHARED(type, name)                                      \
  extern __shared__ __align__(16) unsigned char strata_shared_bytes[]; \
  type* name = reinterpret_cast<type*>(strata_shared_bytes)
#endif
