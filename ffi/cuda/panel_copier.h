// Matrices of the file on their way to where a device's kernels read them, as panels.
//
// Panels are made by all cores at once, in one half of a page-locked staging memory, while the
// copy engine takes the other half to the device: a model loads as fast as the slower of both.
// Panels for memory of the host are made in place.
//
// Staging, and why nothing in it is overwritten: half h is written only after the event that was
// recorded behind the last copy out of h, all on one stream.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/gguf_types.h"
#include "common/thread_pool.h"
#include "cuda/launch.h"
#include "cuda/panels.h"

namespace strata {

class PanelCopier {
 public:
  // Throws std::runtime_error where page-locked memory is not to be had.
  PanelCopier();
  ~PanelCopier();
  PanelCopier(const PanelCopier&) = delete;
  PanelCopier& operator=(const PanelCopier&) = delete;

  // Queues a matrix of raw GGUF rows, which must stay until Flush, for `to`: panel_bytes a panel.
  // Returns what went wrong with this or an earlier one, or an empty string.
  std::string Add(const TypeInfo& type, int64_t rows, int64_t cols, const uint8_t* raw, uint8_t* to,
                  bool on_device);
  // Returns when everything has landed.
  std::string Flush();

 private:
  // Some panels of a matrix, by one thread.
  struct Piece {
    const TypeInfo* type;
    PanelShape shape;
    const uint8_t* raw;
    int64_t first;
    int64_t count;
    uint8_t* made;  // where the panels are made
  };
  // Bytes of the staging half that go to one place.
  struct Copy {
    const uint8_t* from;
    uint8_t* to;
    int64_t bytes;
  };

  std::string Send();
  void Release();

  std::unique_ptr<ThreadPool> packers_;
  uint8_t* staging_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, 2> landed_ = {};
  int half_ = 0;
  int64_t used_ = 0;  // of the half
  std::vector<Piece> pieces_;
  std::vector<Copy> copies_;
};

}  // namespace strata
