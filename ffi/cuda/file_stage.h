// Experts that stay in the model's file, for tiles: panels are made of the file's rows in
// page-locked memory, layer by layer ahead of the tile that reads them over the link. (Windows have
// them computed by the host's threads, from the mapping; host_workers.h.)
//
// The memory has two halves. The layers that have such experts are numbered in order, and layer
// number i uses half i % 2, always at the same place: so the table of experts (expert_word.h) holds
// an address for each of them, and tile kernels know of no difference.
//
// A tile goes through all layers in order, and turns are counted: turn n is one layer of one tile.
// Page-locked words (StageBox), beside those of a bell (bell.h), of which `doorbell` is the newest
// turn that is over and `done` the newest one whose panels are there:
//    256  wanted  device writes: the newest turn that has begun
// Order. Device: `wanted` = n with release; waits until `done` >= n with acquire; kernels of the
// layer; `doorbell` = n with release, in stream order behind them. Host: makes the panels of the
// turn after `done` when it is at most one ahead of `wanted`, in a half whose last turn is over by
// `doorbell`; then `done` with release. So no panel is written while a kernel may read it, and none
// is read before it is whole. A half that holds the layer already is not made again.
// A tile of so many rows that they come through a ring (expert_ring.h) goes through its turns, too,
// but asks for nothing: it never writes `wanted`, unless the ring fails.
// Time-out and recovery as for letters. A step that was given up goes through its turns without
// waiting; turns that are over are left out by the host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/thread_pool.h"
#include "cuda/bell.h"
#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct StageBox : Bell {
  alignas(64) uint64_t wanted;
};
static_assert(sizeof(StageBox) == sizeof(Bell) + 64);

// What kernels are told.
struct StageAt {
  StageBox* box = nullptr;  // the device's address
  BellState* state = nullptr;
};

// A turn that begins: with more live rows than `most_rows` nothing is asked for.
struct TurnArgs {
  StageAt at;
  const int32_t* live;
  int32_t most_rows;
};

// Enqueue the two ends of a turn.
std::string BeginTurn(const TurnArgs& turn, cudaStream_t stream);
std::string EndTurn(const StageAt& at, cudaStream_t stream);

class FileStage {
 public:
  // Experts of one layer that stay in the file; they lie in a half one after the other.
  struct Layer {
    ExpertShape shape;
    std::vector<ExpertBytes> experts;
  };

  // `layers` in order, those that have such experts. Throws std::runtime_error where memory is
  // short.
  FileStage(std::vector<Layer> layers, int num_threads, int64_t timeout_ms);
  // Stop first.
  ~FileStage();
  FileStage(const FileStage&) = delete;
  FileStage& operator=(const FileStage&) = delete;

  // The device's address of the half of layer number `layer`.
  uint8_t* HalfOf(int64_t layer) const { return seen_ + (layer % 2) * half_bytes_; }

  const StageAt& at() const { return at_; }
  bool aborted() const { return __atomic_load_n(&box_->aborted, __ATOMIC_ACQUIRE) != 0; }
  // With no step under way; false if the thread has not come home within `grace`.
  bool Recover(std::chrono::milliseconds grace);
  // Ends the thread; false if it is stuck. Then the object must be kept for good.
  bool Stop(std::chrono::milliseconds grace);
  void SetTimeout(int64_t timeout_ms);

 private:
  void Loop();
  bool Ready(uint64_t turn) const;
  bool Make(uint64_t turn);

  std::vector<Layer> layers_;
  int64_t half_bytes_ = 0;
  StageBox* box_ = nullptr;
  uint8_t* memory_ = nullptr;  // both halves
  uint8_t* seen_ = nullptr;    // the same as the device sees it
  StageAt at_;
  int64_t holds_[2] = {-1, -1};  // number of the layer in a half
  uint64_t last_[2] = {0, 0};    // turn that used it last, or will
  ThreadPool pool_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> busy_{false};
  std::atomic<bool> gone_{false};
  std::thread thread_;
};

}  // namespace strata
