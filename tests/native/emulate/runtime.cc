#include "emulate/runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "emulate/run.h"

namespace {

int capability = 8;  // its major number
int multiprocessors = 4;
size_t copy_limit = SIZE_MAX;

constexpr size_t kAlignment = 256;  // as cudaMalloc's
constexpr int kDevices = 2;

using Ranges = std::map<uintptr_t, size_t>;  // bytes by address

// What a process has on the device and pinned on the host.
struct Memory {
  std::mutex mutex;
  Ranges device;
  Ranges pinned;                    // allocated here
  Ranges registered;                // the caller's
  std::map<uintptr_t, int> owners;  // device by address
  size_t device_bytes[kDevices] = {};
  size_t total_bytes = size_t{4} << 30;
};

Memory& TheMemory() {
  static Memory* memory = new Memory;
  return *memory;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

cudaError_t Result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The range that holds the address; end() if none does.
Ranges::const_iterator Holder(const Ranges& ranges, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return at < found->first + found->second ? found : ranges.end();
}

// Whether all bytes lie within one allocation or outside of all: arrays of the caller's runtime,
// which this one does not know, count as either side.
bool Fits(const Ranges& ranges, const void* address, size_t bytes) {
  const auto holder = Holder(ranges, address);
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (holder != ranges.end()) return at + bytes <= holder->first + holder->second;
  const auto next = ranges.upper_bound(at);
  return next == ranges.end() || at + bytes <= next->first;
}

bool CopyIsRight(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const Ranges& device = memory.device;
  const bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
  const bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
  if (to_host && Holder(device, to) != device.end()) return false;
  if (from_host && Holder(device, from) != device.end()) return false;
  return Fits(device, to, bytes) && Fits(device, from, bytes);
}

void* Allocate(size_t bytes) {
  void* address =
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (address != nullptr) std::memset(address, 0xff, bytes);
  return address;
}

}  // namespace

namespace emulate {

void SetDeviceMemory(size_t bytes) {
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  TheMemory().total_bytes = bytes;
}

void SetCopyLimit(size_t bytes) { copy_limit = bytes; }

void SetCapability(int major) { capability = major; }

void SetMultiprocessors(int count) { multiprocessors = count; }

size_t MostSharedBytes() { return capability == 9 ? kMostSharedBytes : 99 * 1024; }

size_t DeviceBytes() {
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  size_t bytes = 0;
  for (const size_t each : TheMemory().device_bytes) bytes += each;
  return bytes;
}

size_t PinnedBytes() {
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  size_t bytes = 0;
  for (const auto& range : TheMemory().pinned) bytes += range.second;
  for (const auto& range : TheMemory().registered) bytes += range.second;
  return bytes;
}

}  // namespace emulate

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorPeerAccessAlreadyEnabled:
      return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
  }
  return "unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorInvalidValue) return "invalid argument";
  return cudaGetErrorName(error);
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return Result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (device < 0 || device >= kDevices || peer < 0) return Result(cudaErrorInvalidDevice);
  *can = peer < kDevices && peer != device;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  static bool enabled[kDevices] = {};
  if (peer != 1 - current_device) return Result(cudaErrorInvalidDevice);
  const cudaError_t status =
      enabled[current_device] ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess;
  enabled[current_device] = true;
  return Result(status);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return Result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(emulate::MostSharedBytes());
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 9;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const std::lock_guard<std::mutex> lock(TheMemory().mutex);
  const Memory& memory = TheMemory();
  const size_t used = memory.device_bytes[current_device];
  *total_bytes = memory.total_bytes;
  *free_bytes = memory.total_bytes > used ? memory.total_bytes - used : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  size_t& used = memory.device_bytes[current_device];
  if (bytes > memory.total_bytes || used > memory.total_bytes - bytes) {
    return Result(cudaErrorMemoryAllocation);
  }
  *address = Allocate(bytes);
  if (*address == nullptr) return Result(cudaErrorMemoryAllocation);
  memory.device[reinterpret_cast<uintptr_t>(*address)] = bytes;
  memory.owners[reinterpret_cast<uintptr_t>(*address)] = current_device;
  used += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.device.find(reinterpret_cast<uintptr_t>(address));
  if (found == memory.device.end()) return Result(cudaErrorInvalidValue);
  std::memset(address, 0xff, found->second);  // so that a later read shows
  const auto owner = memory.owners.find(found->first);
  memory.device_bytes[owner->second] -= found->second;
  memory.owners.erase(owner);
  memory.device.erase(found);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  *address = Allocate(bytes);
  if (*address == nullptr) return Result(cudaErrorMemoryAllocation);
  memory.pinned[reinterpret_cast<uintptr_t>(*address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** address, size_t bytes, unsigned flags) {
  return cudaHostAlloc(address, bytes, flags);
}

cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) return cudaSuccess;
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (memory.pinned.erase(reinterpret_cast<uintptr_t>(address)) == 0) {
    return Result(cudaErrorInvalidValue);
  }
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  if (address == nullptr || bytes == 0) return Result(cudaErrorInvalidValue);
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  if (Holder(memory.registered, address) != memory.registered.end() ||
      !Fits(memory.registered, address, bytes)) {
    return Result(cudaErrorHostMemoryAlreadyRegistered);
  }
  memory.registered[reinterpret_cast<uintptr_t>(address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const bool was = memory.registered.erase(reinterpret_cast<uintptr_t>(address)) != 0;
  return Result(was ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  Memory& memory = TheMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  *device = host;
  const bool known = Holder(memory.pinned, host) != memory.pinned.end() ||
                     Holder(memory.registered, host) != memory.registered.end();
  return Result(known ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return cudaSuccess;
  if (bytes > copy_limit || !CopyIsRight(to, from, bytes, kind))
    return Result(cudaErrorInvalidValue);
  if (bytes == sizeof(uint64_t) && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) == 0) {
    // As a copy engine does: at once, behind all that it copied before.
    uint64_t word;
    std::memcpy(&word, from, bytes);
    __atomic_store_n(static_cast<uint64_t*>(to), word, __ATOMIC_RELEASE);
    return cudaSuccess;
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  {
    Memory& memory = TheMemory();
    const std::lock_guard<std::mutex> lock(memory.mutex);
    if (!Fits(memory.device, address, bytes)) return Result(cudaErrorInvalidValue);
  }
  std::memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(address, value, bytes);
}
