// What the matrix units of cuda/mma.cuh do, which all 32 lanes of a warp must ask together.
#pragma once

#include <cstdint>

#include "emulate/sync.h"

namespace emulate {

void MmaS8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4],
           Place place = {});
void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place place = {});
void MmaF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place place = {});
void LoadMatrices(uint32_t (&r)[4], const uint8_t* row, Place place = {});
void LoadTransposed(uint32_t (&r)[4], const uint8_t* row, Place place = {});

// The thread's rows g and g + 8 of 16 values, of which the lanes show each other A's fragments.
void ShowRows(const uint32_t (&a)[4], uint32_t (&rows)[2][8], const Place& place);

// Adds the products of two pairs of bfloat16.
void AddProductsBf16(uint32_t a, uint32_t b, float* sum);

// Rounded to nearest even; a NaN stays one.
uint32_t Bf16Bits(float value);
uint32_t HalfBits(float value);

}  // namespace emulate
