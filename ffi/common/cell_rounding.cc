#include "common/cell_rounding.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/numerics.h"
#include "common/simd.h"

namespace strata {
namespace {

constexpr int64_t kGroup = kScaleValues;

typedef uint16_t Short16v __attribute__((vector_size(32)));
typedef int8_t Byte16v __attribute__((vector_size(16)));

// Round to nearest even: the bits of an IEEE half.
uint16_t HalfOf(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded by the addition itself.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

STRATA_INLINE void LoadHalves(const uint16_t* from, Float16v& to) {
  Short16v halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Int16v bits = __builtin_convertvector(halves, Int16v);
  const Int16v magnitude = (bits & 0x7fff) << 13;
  std::memcpy(&to, &magnitude, sizeof(to));
  to *= 0x1p112f;  // exact, subnormals too
  Int16v wide;
  std::memcpy(&wide, &to, sizeof(to));
  wide |= (bits & 0x7c00) == 0x7c00 ? Int16v{} + 0x7f800000 : Int16v{};
  wide |= (bits & 0x8000) << 16;
  std::memcpy(&to, &wide, sizeof(to));
}

STRATA_INLINE void LoadCodes(const int8_t* from, float scale, Float16v& to) {
  Byte16v codes;
  std::memcpy(&codes, from, sizeof(codes));
  to = __builtin_convertvector(__builtin_convertvector(codes, Int16v), Float16v) * scale;
}

STRATA_CLONES void WidenHalves(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Float16v x;
    LoadHalves(from + i, x);
    Store(x, to + i);
  }
}

STRATA_CLONES void WidenCodes(const int8_t* from, const float* scales, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Float16v x;
    LoadCodes(from + i, scales[i / kGroup], x);
    Store(x, to + i);
  }
}

float LargestMagnitude(const float* x, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(x[i]);
    if (!(magnitude <= 0x1.fffffep127f)) return magnitude + magnitude;  // not finite
    largest = std::max(largest, magnitude);
  }
  return largest;
}

void QuantizeHead(const float* from, int64_t dim, int8_t* codes, float* scales) {
  for (int64_t begin = 0; begin < dim; begin += kGroup, ++scales) {
    const int64_t count = std::min(kGroup, dim - begin);
    const float largest = LargestMagnitude(from + begin, count);
    if (!(largest <= 0x1.fffffep127f) || largest < 0x1p-100f) {
      std::fill_n(codes + begin, count, int8_t{0});
      *scales = largest < 0x1p-100f ? 0.0f : std::bit_cast<float>(0x7fc00000u);
      continue;
    }
    const float inverse = 127.0f / largest;
    for (int64_t i = 0; i < count; ++i) {
      codes[begin + i] = static_cast<int8_t>(std::nearbyint(from[begin + i] * inverse));
    }
    *scales = largest * 0x1.020408p-7f;
  }
}

void StoreHead(CellType type, const float* from, int64_t head, int64_t dim, void* to,
               float* scales) {
  switch (type) {
    case CellType::kFloat32:
      std::memcpy(static_cast<float*>(to) + head * dim, from, dim * sizeof(float));
      return;
    case CellType::kFloat16: {
      uint16_t* halves = static_cast<uint16_t*>(to) + head * dim;
      for (int64_t i = 0; i < dim; ++i) halves[i] = HalfOf(from[i]);
      return;
    }
    case CellType::kInt8:
      QuantizeHead(from, dim, static_cast<int8_t*>(to) + head * dim, scales);
  }
}

void WidenHead(CellType type, const void* from, int64_t first, int64_t count, const float* scales,
               float* to) {
  switch (type) {
    case CellType::kFloat32:
      std::memcpy(to, static_cast<const float*>(from) + first, count * sizeof(float));
      return;
    case CellType::kFloat16:
      WidenHalves(static_cast<const uint16_t*>(from) + first, count, to);
      return;
    case CellType::kInt8:
      WidenCodes(static_cast<const int8_t*>(from) + first, scales, count, to);
  }
}

// A head's scales: of its key, then of its value.
float* ScalesOf(const CellStore& cells, int64_t head, int64_t dim) {
  return cells.type == CellType::kInt8 ? cells.scales + head * 2 * ScaleGroups(dim) : nullptr;
}

}  // namespace

void StoreKey(const CellStore& cells, int64_t head, int64_t dim, const float* from) {
  StoreHead(cells.type, from, head, dim, cells.keys, ScalesOf(cells, head, dim));
}

void StoreValue(const CellStore& cells, int64_t head, int64_t dim, const float* from) {
  float* scales = ScalesOf(cells, head, dim);
  StoreHead(cells.type, from, head, dim, cells.values,
            scales == nullptr ? nullptr : scales + ScaleGroups(dim));
}

void WidenKey(const CellStore& cells, int64_t head, int64_t dim, float* to) {
  WidenHead(cells.type, cells.keys, head * dim, dim, ScalesOf(cells, head, dim), to);
}

void WidenValue(const CellStore& cells, int64_t head, int64_t dim, int64_t begin, int64_t count,
                float* to) {
  const float* scales = ScalesOf(cells, head, dim);
  WidenHead(cells.type, cells.values, head * dim + begin, count,
            scales == nullptr ? nullptr : scales + ScaleGroups(dim) + begin / kGroup, to);
}

}  // namespace strata
