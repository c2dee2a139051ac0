// Turning what a call got wrong into the error that XLA reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace strata {

// Whether an operand has exactly these sizes; the binding has checked how many axes there are.
template <typename Buffer>
bool HasShape(const Buffer& buffer, std::initializer_list<int64_t> sizes) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), sizes.begin(), sizes.end());
}

// A handler that takes no exception out with it: XLA's threads would end the process.
template <typename... Args>
auto Caught(const char* op, xla::ffi::Error (*handle)(Args...)) {
  return [op, handle](Args... args) {
    using xla::ffi::Error;
    try {
      return handle(args...);
    } catch (const std::bad_alloc&) {
      return Error(xla::ffi::ErrorCode::kResourceExhausted,
                   std::string(op) +
                       ": no memory for this step; a shorter --max_context, a "
                       "smaller --expert_cache or fewer other programs leave more");
    } catch (const std::exception& error) {
      return Error::Internal(std::string(op) + ": " + error.what());
    } catch (...) {
      return Error::Internal(std::string(op) + ": something unknown was thrown");
    }
  };
}

// Returns an error naming the op from a handler when `condition` does not hold.
#define STRATA_CHECK_ARG(op, condition, text)                                              \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      return xla::ffi::Error::InvalidArgument(std::string(op) + ": " + std::string(text)); \
    }                                                                                      \
  } while (false)

}  // namespace strata
