// Whether group_mma.cuh's instructions may be used.
#pragma once

namespace strata {

// Whether this build has code for the current device's group instructions, those of capability 9.0.
bool HasGroupUnits();

}  // namespace strata
