// How messages name places in the source.
#pragma once

#include <string>

#include "emulate/sync.h"

namespace emulate {

bool SamePlace(const Place& a, const Place& b);
std::string Text(const Place& place);

}  // namespace emulate
