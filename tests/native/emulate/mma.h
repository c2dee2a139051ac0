// What the matrix units and asynchronous copies of cuda/mma.cuh do.
//
// All 32 lanes of a warp must call the matrix functions. Asynchronous copies are made when they are
// waited for, the later the better for finding code that does not wait; until then the bytes are
// 0xFF.
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

// A group's product of 64 rows and some columns, d[num_columns / 2]: the operands are addresses of
// rows of 128 bytes, plus the first byte in a row; read at once, from where cuda/mma.cuh's
// SwizzledAt puts a row's chunks.
void GroupMmaS8(int* d, int num_columns, uint64_t rows, uint64_t columns);

void CopyAsync(void* to, const void* from, bool valid, Place place = {});
void WaitForCopies();
void EndCopyGroup();
void WaitForGroups(int last);

// Rounded to nearest even; a NaN stays one.
uint32_t Bf16Bits(float value);
uint32_t HalfBits(float value);

}  // namespace emulate
