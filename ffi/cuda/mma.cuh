// Matrix units and asynchronous copies: instructions of sm_80 and later, a warp's together, spelled
// as PTX; emulated where there is no GPU (mma.h and async.h of tests/native/emulate).
//
// Fragments of 32 lanes, lane l with g = l / 4 and t = l % 4 (PTX ISA, "Matrix fragments for mma"):
//   D, C 16 x 8    c[0], c[1]: row g, columns 2t, 2t + 1; c[2], c[3]: row g + 8
//   A, rows of 32 bytes   a[0]: row g, bytes 4t..; a[1]: row g + 8; a[2], a[3]: the same,
//   bytes 16.. B, columns of 32 bytes   b[0]: column g, bytes 4t..; b[1]: bytes 16..
// For int8 the 32 bytes are 32 values, for bfloat16 they are 16.
#pragma once

#include "cuda/launch.h"
#include "cuda/numerics.cuh"

#if defined(STRATA_EMULATE)
#include "emulate/async.h"
#include "emulate/mma.h"
#endif

namespace strata {

// d = A B + c for int8: 32 values of each row and column, exact.
__device__ __forceinline__ void MmaS8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                      const int (&c)[4]) {
#if defined(STRATA_EMULATE)
  emulate::MmaS8(d, a, b0, b1, c);
#else
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

// The same for 16 values: half of the fragments, the first (a[0], a[1], b[0]) or the second.
__device__ __forceinline__ void MmaS8Half(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                          const int (&c)[4]) {
#if defined(STRATA_EMULATE)
  const uint32_t a[4] = {a0, a1, 0, 0};
  emulate::MmaS8(d, a, b0, 0, c);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#endif
}

// d += A B for bfloat16: 16 values of each row and column. The order of the 16 sums, and how they
// are rounded, is the device's own; it is the same for every element.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
#if defined(STRATA_EMULATE)
  emulate::MmaBf16(d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The same for IEEE halves.
__device__ __forceinline__ void MmaF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
#if defined(STRATA_EMULATE)
  emulate::MmaF16(d, a, b0, b1);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four matrices of 8 rows of 16 bytes from shared memory: lane 8i + r names row r of matrix i, and
// gets bytes 4t.. of row g of each.
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], const uint8_t* row) {
#if defined(STRATA_EMULATE)
  emulate::LoadMatrices(r, row);
#else
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
#endif
}

// The same transposed: the lane gets rows 2t and 2t + 1 of column g, a column being 2 bytes.
__device__ __forceinline__ void LoadTransposed(uint32_t (&r)[4], const uint8_t* row) {
#if defined(STRATA_EMULATE)
  emulate::LoadTransposed(r, row);
#else
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
#endif
}

// 16 bytes from global to shared memory, both aligned; zeros where not `valid`, nothing is read
// then. Arrives by WaitForCopies, for other threads after a barrier.
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, bool valid) {
#if defined(STRATA_EMULATE)
  emulate::CopyAsync(shared, global, 16, valid);
#else
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}

// Waits for all of the thread's copies. A kernel must not end without.
__device__ __forceinline__ void WaitForCopies() {
#if defined(STRATA_EMULATE)
  emulate::WaitForCopies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Closes a group of the thread's copies, which may be empty.
__device__ __forceinline__ void EndCopyGroup() {
#if defined(STRATA_EMULATE)
  emulate::EndCopyGroup();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of the thread's groups but the newest kLast.
template <int kLast>
__device__ __forceinline__ void WaitForGroups() {
#if defined(STRATA_EMULATE)
  emulate::WaitForGroups(kLast);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
#endif
}

// Two floats rounded to bfloat16, `low` in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
#if defined(STRATA_EMULATE)
  return emulate::Bf16Bits(low) | emulate::Bf16Bits(high) << 16;
#else
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// Two floats rounded to IEEE halves, `low` in the low half.
__device__ __forceinline__ uint32_t PackF16(float low, float high) {
#if defined(STRATA_EMULATE)
  return emulate::HalfBits(low) | emulate::HalfBits(high) << 16;
#else
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// Tiles of 128 bytes a row lie in shared memory with the 16-byte chunks of a row exchanged, so that
// 8 rows' chunks of one number lie in different banks.
__device__ __forceinline__ int SwizzledAt(int row, int chunk) {
  return row * 128 + ((chunk ^ row) & 7) * 16;
}

}  // namespace strata
