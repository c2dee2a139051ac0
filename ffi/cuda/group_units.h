// Whether group_mma.cuh's instructions may be used.
#pragma once

#include "cuda/launch.h"

namespace strata {

// Whether this build has code for the current device's group instructions, those of capability 9.0.
inline bool HasGroupUnits() {
#if defined(STRATA_EMULATE) || defined(STRATA_BUILT_FOR_GROUPS)
  return ComputeCapability() / 10 == 9;
#else
  return false;
#endif
}

}  // namespace strata
