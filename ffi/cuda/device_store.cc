#include "cuda/device_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/slots.h"
#include "cuda/file_stage.h"
#include "cuda/host_workers.h"
#include "cuda/panels.h"
#include "cuda/peer_store.h"

namespace strata {
namespace {

int64_t Aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

std::string DeviceStore::Failed(const char* what, int64_t bytes, cudaError_t error) {
  size_t free_bytes = 0, total = 0;
  cudaMemGetInfo(&free_bytes, &total);
  return std::string("device_store: ") + what + " of " + std::to_string(bytes >> 20) +
         " MiB failed (" + cudaGetErrorString(error) + "); the device has " +
         std::to_string(free_bytes >> 20) + " of " + std::to_string(total >> 20) + " MiB free";
}

DeviceMatrix ShapeOf(const TypeInfo* type, int64_t count, int64_t rows, int64_t cols) {
  const PanelShape shape = ShapeOfPanels(*type, rows, cols);
  DeviceMatrix m;
  m.type = type;
  m.count = count;
  m.rows = rows;
  m.cols = cols;
  m.unit_bytes = shape.unit_bytes;
  m.panel_bytes = shape.panel_bytes;
  m.bytes_each = shape.matrix_bytes;
  return m;
}

DeviceStore::DeviceStore(int64_t num_roles, int64_t num_layers, int64_t num_experts,
                         int64_t matrix_bytes, int64_t expert_bytes, int64_t host_expert_bytes)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      matrices_(num_roles * num_layers),
      shapes_(num_layers),
      matrix_bytes_(matrix_bytes),
      expert_bytes_(expert_bytes),
      host_bytes_(host_expert_bytes),
      table_(num_layers * num_experts),
      raw_(num_layers * num_experts, ExpertBytes{}),
      in_file_(num_layers),
      taken_(num_layers * num_experts) {
  const auto take = [&](const char* what, int64_t bytes, auto allocate) {
    const cudaError_t error = bytes == 0 ? cudaSuccess : allocate();
    if (error == cudaSuccess) return;
    const std::string text = Failed(what, bytes, error);
    Release();
    throw std::runtime_error(text);
  };
  const int64_t pairs = num_layers * num_experts;
  take("the matrices' arena", matrix_bytes,
       [&] { return cudaMalloc(&matrix_arena_, matrix_bytes); });
  take("the experts' arena", expert_bytes,
       [&] { return cudaMalloc(&expert_arena_, expert_bytes); });
  take("the experts' page-locked memory", host_expert_bytes, [&] {
    return cudaHostAlloc(reinterpret_cast<void**>(&host_arena_), host_expert_bytes,
                         cudaHostAllocMapped | cudaHostAllocPortable);
  });
  take("the table of experts", pairs * 8, [&] { return cudaMalloc(&experts_, pairs * 8); });
  take("usage counts", pairs * 4, [&] { return cudaMalloc(&usage_, pairs * 4); });
  if (pairs > 0) {
    take("usage counts", pairs * 4, [&] { return cudaMemset(usage_, 0, pairs * 4); });
  }
}

DeviceStore::~DeviceStore() { Release(); }

void DeviceStore::Release() {
  copier_ = nullptr;
  // A step may still be in flight, and wait for the host's threads.
  cudaDeviceSynchronize();
  StopHost();
  StopFiles();
  swaps_ = nullptr;
  ring_ = nullptr;
  timeline_ = nullptr;
  peer_ = nullptr;
  for (void* memory :
       {static_cast<void*>(matrix_arena_), static_cast<void*>(expert_arena_),
        static_cast<void*>(experts_), static_cast<void*>(wanted_), static_cast<void*>(usage_),
        static_cast<void*>(doors_.homes), static_cast<void*>(doors_.mailbox.state)}) {
    cudaFree(memory);
  }
  cudaFreeHost(host_arena_);
}

PanelCopier& DeviceStore::Copier() {
  if (copier_ == nullptr) copier_ = std::make_unique<PanelCopier>();
  return *copier_;
}

std::string DeviceStore::Put(int64_t role, int64_t layer, const DeviceMatrix& shape, int64_t stride,
                             const uint8_t* raw) {
  const int64_t num_roles = static_cast<int64_t>(matrices_.size()) / num_layers_;
  if (role < 0 || role >= num_roles || layer < 0 || layer >= num_layers_) {
    return "device_store: role " + std::to_string(role) + ", layer " + std::to_string(layer) +
           " outside [0, " + std::to_string(num_roles) + ") x [0, " + std::to_string(num_layers_) +
           ")";
  }
  const int64_t bytes = Aligned(shape.count * shape.bytes_each);
  if (matrix_used_ + bytes > matrix_bytes_) {
    return "device_store: " + std::to_string(bytes) + " bytes more than the " +
           std::to_string(matrix_bytes_) + " planned for matrices";
  }
  DeviceMatrix& matrix = matrices_[role * num_layers_ + layer];
  matrix = shape;
  matrix.bytes = matrix_arena_ + matrix_used_;
  matrix_used_ += bytes;
  const int64_t row_bytes = shape.cols / shape.type->block_values * shape.type->block_bytes;
  std::string error;
  for (int64_t i = 0; i < shape.count && error.empty(); ++i) {
    error = Copier().Add(*shape.type, shape.rows, shape.cols, raw + i * stride * row_bytes,
                         const_cast<uint8_t*>(matrix.bytes) + i * shape.bytes_each, true);
  }
  return error;
}

const DeviceMatrix* DeviceStore::Get(int64_t role, int64_t layer) const {
  if (layer < 0 || layer >= num_layers_ || role < 0 ||
      role * num_layers_ >= static_cast<int64_t>(matrices_.size())) {
    return nullptr;
  }
  const DeviceMatrix& matrix = matrices_[role * num_layers_ + layer];
  return matrix.bytes == nullptr ? nullptr : &matrix;
}

std::string DeviceStore::PutExpertShape(int64_t layer, const ExpertShape& shape) {
  if (layer < 0 || layer >= num_layers_) return "device_store: no layer " + std::to_string(layer);
  shapes_[layer] = shape;
  return "";
}

const ExpertShape* DeviceStore::GetExpertShape(int64_t layer) const {
  if (layer < 0 || layer >= num_layers_ || shapes_[layer].bytes == 0) return nullptr;
  return &shapes_[layer];
}

uint8_t* DeviceStore::Place(Arena arena, int64_t offset, int64_t bytes, std::string* error) const {
  uint8_t* base = arena == Arena::kDevice ? expert_arena_ : host_arena_;
  int64_t room = arena == Arena::kDevice ? expert_bytes_ : host_bytes_;
  if (arena == Arena::kPeer) {
    base = peer_ == nullptr ? nullptr : peer_->arena();
    room = peer_ == nullptr ? 0 : peer_->sizes().expert_bytes;
  }
  if (offset < 0 || offset % 256 != 0 || offset + bytes > room) {
    *error = "device_store: an expert of " + std::to_string(bytes) + " bytes at " +
             std::to_string(offset) + " of " + std::to_string(room);
    return nullptr;
  }
  return base + offset;
}

std::string DeviceStore::PutExpert(int64_t layer, int64_t expert, Arena arena, int64_t offset,
                                   const uint8_t* gate, const uint8_t* up, const uint8_t* down) {
  const ExpertShape* shape = GetExpertShape(layer);
  if (shape == nullptr || expert < 0 || expert >= num_experts_) {
    return "device_store: no expert " + std::to_string(expert) + " in layer " +
           std::to_string(layer);
  }
  std::string error;
  uint8_t* to = Place(arena, offset, shape->bytes, &error);
  if (to == nullptr) return error;
  const auto add = [&](const DeviceMatrix& m, const uint8_t* raw, int64_t at) {
    return Copier().Add(*m.type, m.rows, m.cols, raw, to + at, arena != Arena::kHost);
  };
  error = add(shape->gate, gate, 0);
  if (error.empty()) error = add(shape->up, up, shape->up_at);
  if (error.empty()) error = add(shape->down, down, shape->down_at);
  if (!error.empty()) return error;
  const ExpertTag tag = arena == Arena::kPeer ? ExpertTag::kPeer : ExpertTag::kLocal;
  table_[layer * num_experts_ + expert] = ExpertWord(to, tag, arena == Arena::kHost);
  raw_[layer * num_experts_ + expert] = {gate, up, down};
  return "";
}

std::string DeviceStore::PutFileExpert(int64_t layer, int64_t expert, const uint8_t* gate,
                                       const uint8_t* up, const uint8_t* down) {
  if (GetExpertShape(layer) == nullptr || expert < 0 || expert >= num_experts_) {
    return "device_store: no expert " + std::to_string(expert) + " in layer " +
           std::to_string(layer);
  }
  table_[layer * num_experts_ + expert] = ExpertWord(nullptr, ExpertTag::kHost, false) | kFromFile;
  raw_[layer * num_experts_ + expert] = {gate, up, down};
  in_file_[layer].push_back(static_cast<int32_t>(expert));
  return "";
}

std::string DeviceStore::PublishExperts() {
  if (copier_ != nullptr) {
    const std::string error = copier_->Flush();
    copier_ = nullptr;
    if (!error.empty()) return error;
  }
  cudaError_t copied =
      cudaMemcpy(experts_, table_.data(), table_.size() * 8, cudaMemcpyHostToDevice);
  if (copied == cudaSuccess && wanted_ != nullptr) {
    copied = cudaMemcpy(wanted_, table_.data(), table_.size() * 8, cudaMemcpyHostToDevice);
  }
  return copied == cudaSuccess ? "" : Failed("a copy", table_.size() * 8, copied);
}

std::string DeviceStore::AuditExpert(int64_t layer, int64_t expert, const uint8_t* gate,
                                     const uint8_t* up, const uint8_t* down) {
  const ExpertShape* shape = GetExpertShape(layer);
  if (shape == nullptr || expert < 0 || expert >= num_experts_) {
    return "no expert " + std::to_string(expert) + " in layer " + std::to_string(layer);
  }
  uint64_t word = 0;
  cudaDeviceSynchronize();
  cudaError_t copied = cudaMemcpy(&word, experts_ + layer * num_experts_ + expert, sizeof(word),
                                  cudaMemcpyDeviceToHost);
  const auto* at = reinterpret_cast<const uint8_t*>(word & ~kTagBits);
  if (copied == cudaSuccess && (word & kFromFile) != 0) return "";  // it has no place of its own
  std::vector<uint8_t> slot(shape->bytes);
  if (copied == cudaSuccess) {
    copied = cudaMemcpy(slot.data(), at, shape->bytes, cudaMemcpyDefault);
  }
  if (copied != cudaSuccess) return Failed("a copy", shape->bytes, copied);
  const auto differs = [&](const DeviceMatrix& m, int64_t offset, const uint8_t* raw) {
    const int64_t row_bytes = m.cols / m.type->block_values * m.type->block_bytes;
    std::vector<uint8_t> rows(m.rows * row_bytes);
    const PanelShape panels = ShapeOfPanels(*m.type, m.rows, m.cols);
    UnpackPanels(*m.type, panels, slot.data() + offset, 0, panels.num_panels, rows.data());
    return std::memcmp(rows.data(), raw, rows.size()) != 0;
  };
  const std::string where =
      "expert " + std::to_string(expert) + " of layer " + std::to_string(layer);
  if (differs(shape->gate, 0, gate)) return where + ": its gate is not the file's";
  if (differs(shape->up, shape->up_at, up)) return where + ": its up is not the file's";
  if (differs(shape->down, shape->down_at, down)) return where + ": its down is not the file's";
  return "";
}

std::vector<uint32_t> DeviceStore::TakeUsage() {
  // Kernels go on raising the counts, and swaps go by them: they are read and stay.
  std::vector<uint32_t> usage(table_.size());
  cudaDeviceSynchronize();
  cudaMemcpy(usage.data(), usage_, usage.size() * 4, cudaMemcpyDeviceToHost);
  for (size_t i = 0; i < usage.size(); ++i) {
    const uint32_t now = usage[i];
    usage[i] -= taken_[i];
    taken_[i] = now;
  }
  return usage;
}

int64_t AddDeviceStore(std::shared_ptr<DeviceStore> store) {
  return Slots<DeviceStore>::Global().Add(std::move(store));
}

void RemoveDeviceStore(int64_t slot) { Slots<DeviceStore>::Global().Remove(slot); }

std::shared_ptr<DeviceStore> FindDeviceStore(int64_t slot) {
  return Slots<DeviceStore>::Global().Find(slot);
}

}  // namespace strata
