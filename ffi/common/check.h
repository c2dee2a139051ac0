// Turning what a call got wrong into the error that XLA reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace strata {

// Whether an operand has exactly these sizes; the binding has checked how many axes there are.
template <typename Buffer>
bool HasShape(const Buffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), sizes.begin(), sizes.end());
}

// Returns an error naming the op from a handler when `condition` does not hold.
#define STRATA_CHECK_ARG(op, condition, text)                                              \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      return xla::ffi::Error::InvalidArgument(std::string(op) + ": " + std::string(text)); \
    }                                                                                      \
  } while (false)

}  // namespace strata
