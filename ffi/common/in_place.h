// Operands that a handler updates in place.
#pragma once

#include <cstring>

namespace strata {

// The result's memory, holding the operand's values. In a donated step both are one buffer; where
// XLA could not alias them (a call outside such a step) the operand is copied.
template <typename From, typename To>
auto* InPlace(const From& from, To& to) {
  if (to->typed_data() != from.typed_data()) {
    std::memcpy(to->typed_data(), from.typed_data(), from.size_bytes());
  }
  return to->typed_data();
}

}  // namespace strata
