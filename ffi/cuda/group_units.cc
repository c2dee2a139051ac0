#include "cuda/group_units.h"

#include "cuda/launch.h"

namespace strata {

// Defined once, for what the build has is told to this file alone (CMakeLists.txt).
bool HasGroupUnits() {
#if defined(STRATA_EMULATE) || defined(STRATA_BUILT_FOR_GROUPS)
  return ComputeCapability() / 10 == 9;
#else
  return false;
#endif
}

}  // namespace strata
