#include "cuda/device_table.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "common/slots.h"

namespace strata {
namespace {

constexpr int64_t kSliceBytes = int64_t{16} << 20;  // copied between two looks at the clock
constexpr int64_t kMaxRowBytes = 32 << 10;          // a row lies in a block's shared memory
constexpr int64_t kPadding = 16;                    // behind the last row

std::string CheckTable(const TypeInfo* type, int64_t num_rows, int64_t num_cols,
                       const uint8_t* host) {
  if (type == nullptr || num_rows < 1 || num_cols < 1 || num_cols % type->block_values != 0 ||
      host == nullptr) {
    return "a table of " + std::to_string(num_rows) + " rows of " + std::to_string(num_cols) +
           " values, whole blocks of a known type expected";
  }
  const int64_t row_bytes = num_cols / type->block_values * int64_t{type->block_bytes};
  if (row_bytes > kMaxRowBytes || num_rows > INT64_MAX / 2 / row_bytes) {
    return std::to_string(num_rows) + " rows of " + std::to_string(row_bytes) + " bytes, at most " +
           std::to_string(kMaxRowBytes) + " bytes a row expected on a GPU";
  }
  return "";
}

}  // namespace

DeviceTable::DeviceTable(TablePlace place, const TypeInfo* type, int64_t num_rows, int64_t num_cols,
                         const uint8_t* host)
    : place_(place),
      type_(type),
      num_rows_(num_rows),
      num_cols_(num_cols),
      row_bytes_(num_cols / type->block_values * type->block_bytes),
      host_(host) {}

std::string DeviceTable::Open(TablePlace place, const TypeInfo* type, int64_t num_rows,
                              int64_t num_cols, const uint8_t* host,
                              std::shared_ptr<DeviceTable>* table) {
  std::string wrong = CheckTable(type, num_rows, num_cols, host);
  if (!wrong.empty()) return wrong;
  std::shared_ptr<DeviceTable> made(new DeviceTable(place, type, num_rows, num_cols, host));
  wrong = made->Allocate();
  if (!wrong.empty()) return wrong;
  *table = std::move(made);
  return "";
}

std::string DeviceTable::OpenRead(std::shared_ptr<NgramTable> read, int64_t most_rows,
                                  int64_t timeout_ms, std::shared_ptr<DeviceTable>* table) {
  if (read == nullptr) return "the table to be read is closed";
  if (read->row_bytes() > kMaxRowBytes) {
    return "rows of " + std::to_string(read->row_bytes()) + " bytes, at most " +
           std::to_string(kMaxRowBytes) + " expected on a GPU";
  }
  std::shared_ptr<DeviceTable> made(new DeviceTable(TablePlace::kMapped, read->type(),
                                                    read->num_rows(), read->num_cols(), nullptr));
  std::string wrong = TableReader::Open(std::move(read), most_rows, timeout_ms, &made->reader_);
  if (!wrong.empty()) return wrong;
  *table = std::move(made);
  return "";
}

std::string DeviceTable::Allocate() {
  const size_t bytes = static_cast<size_t>(num_bytes() + kPadding);
  const std::string amount = std::to_string(num_bytes() >> 20) + " MiB of ";
  if (place_ == TablePlace::kDevice) {
    const cudaError_t error = cudaMalloc(&memory_, bytes);
    rows_ = memory_;
    if (error == cudaSuccess) return "";
    cudaGetLastError();  // what was answered is no error of a later call
    return amount + "the device's memory are not to be had (" + cudaGetErrorString(error) + ")";
  }
  cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&memory_), bytes,
                                    cudaHostAllocMapped | cudaHostAllocPortable);
  void* seen = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&seen, memory_, 0);
  rows_ = static_cast<const uint8_t*>(seen);
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return amount + "page-locked memory are not to be had (" + cudaGetErrorString(error) + ")";
}

DeviceTable::~DeviceTable() {
  // What a stuck thread may look at stays for good.
  if (reader_ != nullptr && !reader_->Stop()) static_cast<void>(reader_.release());
  if (memory_ == nullptr) return;
  cudaDeviceSynchronize();  // a step may still be in flight
  if (place_ == TablePlace::kDevice) {
    cudaFree(memory_);
  } else {
    cudaFreeHost(memory_);
  }
}

std::string DeviceTable::Load(double max_s, int64_t* loaded) {
  if (reader_ != nullptr) return "a table that the host reads is not loaded";
  const auto start = std::chrono::steady_clock::now();
  while (!this->loaded()) {
    const int64_t bytes = std::min(kSliceBytes, num_bytes() - loaded_bytes_);
    if (place_ == TablePlace::kMapped) {
      std::memcpy(memory_ + loaded_bytes_, host_ + loaded_bytes_, static_cast<size_t>(bytes));
    } else {
      const cudaError_t error = cudaMemcpy(memory_ + loaded_bytes_, host_ + loaded_bytes_,
                                           static_cast<size_t>(bytes), cudaMemcpyHostToDevice);
      if (error != cudaSuccess) {
        cudaGetLastError();
        return "a copy to the device failed (" + std::string(cudaGetErrorString(error)) + ")";
      }
    }
    loaded_bytes_ += bytes;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() >= max_s) break;
  }
  *loaded = loaded_bytes_;
  return "";
}

int64_t AddDeviceTable(std::shared_ptr<DeviceTable> table) {
  return Slots<DeviceTable>::Global().Add(std::move(table));
}

void RemoveDeviceTable(int64_t slot) { Slots<DeviceTable>::Global().Remove(slot); }

std::shared_ptr<DeviceTable> FindDeviceTable(int64_t slot) {
  return Slots<DeviceTable>::Global().Find(slot);
}

}  // namespace strata
