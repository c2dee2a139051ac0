// Operands that a handler updates in place.
#pragma once

#include <cstring>

namespace strata {

// The result's memory, of whatever type, holding the operand's values. In a donated step both are
// one buffer; where XLA could not alias them (a call outside such a step) the operand is copied.
template <typename From, typename To>
void* InPlaceBytes(const From& from, To& to) {
  if (to->untyped_data() != from.untyped_data()) {
    std::memcpy(to->untyped_data(), from.untyped_data(), from.size_bytes());
  }
  return to->untyped_data();
}

template <typename From, typename To>
auto* InPlace(const From& from, To& to) {
  InPlaceBytes(from, to);
  return to->typed_data();
}

}  // namespace strata
