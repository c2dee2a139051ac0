// A window's operands on their way to the peer.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"

namespace strata {

struct WindowInputs {
  const float* x;         // [T, D]
  const uint64_t* words;  // of the layer's experts (expert_word.h)
  const int32_t* ids;  // [T, A], below 0 in dead rows; null: words are those of the entries, [T, A]
  const int32_t* live;
};

// Room for them.
struct WindowRoom {
  float* x;
  uint64_t* words;  // [T, A]
  int32_t* live;

  WindowInputs inputs() const { return {x, words, nullptr, live}; }
};

// Enqueues a kernel that copies them. Each side may be memory of the device that runs it, of
// another one that it reaches, or mapped memory of the host; with `from_near` the source is the
// device's own and dead rows are left out. To ask elsewhere how many are live would cost more than
// they do.
std::string CopyInputs(const WindowInputs& from, bool from_near, const WindowRoom& to,
                       int64_t num_rows, int64_t num_active, int64_t width, cudaStream_t stream);

}  // namespace strata
