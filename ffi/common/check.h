// Turning what a call got wrong into the error that XLA reports.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace strata {

// Returns an error naming the op from a handler when `condition` does not hold.
#define STRATA_CHECK_ARG(op, condition, text)                                              \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      return xla::ffi::Error::InvalidArgument(std::string(op) + ": " + std::string(text)); \
    }                                                                                      \
  } while (false)

}  // namespace strata
