#include "common/unpack_scalar.h"

namespace strata {

UnpackFn ScalarUnpack(GgmlType type) {
  if (const UnpackFn unpack = ScalarUnpackSmall(type)) return unpack;
  if (const UnpackFn unpack = ScalarUnpackKQuants(type)) return unpack;
  return ScalarUnpackGrids(type);
}

}  // namespace strata
