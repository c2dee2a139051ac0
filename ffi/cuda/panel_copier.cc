#include "cuda/panel_copier.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace strata {
namespace {

constexpr int64_t kHalfBytes = 64 << 20;
// Of a piece: smaller ones would cost more to hand out than to do.
constexpr int64_t kPieceBytes = 256 << 10;
// Pieces made at once where none of them is staged: enough for every core, few enough for progress.
constexpr size_t kMostPieces = 4096;

std::string Failed(const char* what, cudaError_t error) {
  return std::string("panel_copier: ") + what + " failed: " + cudaGetErrorString(error);
}

}  // namespace

PanelCopier::PanelCopier()
    : packers_(std::make_unique<ThreadPool>(
          static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 32u)))) {
  const auto take = [this](const char* what, cudaError_t error) {
    if (error == cudaSuccess) return;
    Release();
    throw std::runtime_error(Failed(what, error));
  };
  take("page-locked staging of 128 MiB",
       cudaHostAlloc(reinterpret_cast<void**>(&staging_), 2 * kHalfBytes, cudaHostAllocDefault));
  take("a stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (cudaEvent_t& event : landed_) {
    take("an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
}

PanelCopier::~PanelCopier() { Release(); }

void PanelCopier::Release() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  for (cudaEvent_t event : landed_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaFreeHost(staging_);
}

std::string PanelCopier::Add(const TypeInfo& type, int64_t rows, int64_t cols, const uint8_t* raw,
                             uint8_t* to, bool on_device) {
  const PanelShape shape = ShapeOfPanels(type, rows, cols);
  if (shape.panel_bytes > kHalfBytes) {
    return "panel_copier: rows of " + std::to_string(cols) + " values are too long";
  }
  const int64_t at_once = std::max<int64_t>(1, kPieceBytes / shape.panel_bytes);
  // Pieces of one matrix make one copy. Of two matrices never: where one ends and the next begins
  // may be the border of two allocations, which no copy may cross.
  bool begins = true;
  for (int64_t first = 0; first < shape.num_panels; first += at_once) {
    const int64_t count = std::min(at_once, shape.num_panels - first);
    const int64_t bytes = count * shape.panel_bytes;
    if ((on_device && used_ + bytes > kHalfBytes) || pieces_.size() == kMostPieces) {
      const std::string error = Send();
      if (!error.empty()) return error;
    }
    uint8_t* place = to + first * shape.panel_bytes;
    Piece piece = {&type, shape, raw, first, count, place};
    if (copies_.empty()) begins = true;
    if (on_device) {
      piece.made = staging_ + half_ * kHalfBytes + used_;
      used_ += bytes;
      if (begins) copies_.push_back({piece.made, place, 0});
      copies_.back().bytes += bytes;
      begins = false;
    }
    pieces_.push_back(piece);
  }
  return "";
}

std::string PanelCopier::Send() {
  cudaError_t error = cudaEventSynchronize(landed_[half_]);
  if (error != cudaSuccess) return Failed("a copy", error);
  packers_->Run(static_cast<int64_t>(pieces_.size()), [this](int64_t i) {
    const Piece& p = pieces_[i];
    PackPanels(*p.type, p.shape, p.raw, p.first, p.count, p.made);
  });
  for (const Copy& copy : copies_) {
    error = cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyHostToDevice, stream_);
    if (error != cudaSuccess) return Failed("a copy", error);
  }
  error = cudaEventRecord(landed_[half_], stream_);
  if (error != cudaSuccess) return Failed("a copy", error);
  half_ = 1 - half_;
  used_ = 0;
  pieces_.clear();
  copies_.clear();
  return "";
}

std::string PanelCopier::Flush() {
  const std::string error = Send();
  if (!error.empty()) return error;
  const cudaError_t landed = cudaStreamSynchronize(stream_);
  return landed == cudaSuccess ? "" : Failed("a copy", landed);
}

}  // namespace strata
