// Asking the system for pages of a mapped file before they are touched, so that they are read side
// by side and not one fault after the other.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "weights/weight_store.h"

namespace strata {

inline void WillNeed(const uint8_t* begin, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes);
  // Only advice: what it does not achieve the touch itself does.
  static_cast<void>(madvise(reinterpret_cast<void*>(first), end - first, MADV_WILLNEED));
}

// The same for an expert; the matrices give the sizes.
template <typename Shape>
void WillNeed(const Shape& gate, const Shape& up, const Shape& down, const ExpertBytes& bytes) {
  const auto ask = [](const Shape& m, const uint8_t* begin) {
    WillNeed(begin, m.rows * (m.cols / m.type->block_values * m.type->block_bytes));
  };
  ask(gate, bytes.gate);
  ask(up, bytes.up);
  ask(down, bytes.down);
}

}  // namespace strata
