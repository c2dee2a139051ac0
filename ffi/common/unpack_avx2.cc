#include "common/unpack_avx2.h"

namespace strata {

UnpackFn Avx2Unpack(GgmlType type) {
  if (const UnpackFn unpack = Avx2UnpackSmall(type)) return unpack;
  if (const UnpackFn unpack = Avx2UnpackKQuants(type)) return unpack;
  return Avx2UnpackGrids(type);
}

}  // namespace strata
