// Matrix units by groups of four warps, 128 threads: int8, operands in shared memory (wgmma of
// sm_90a). The units work on their own: while they multiply one block of 32 values, the warps scale
// and add the sums of another. With mma.sync on the same chip the two take turns, for it holds the
// issue of its warp's processor while it reads registers: 6.2 cycles an instruction were measured
// there, and a block of sums needs 13 float instructions (a count).
#pragma once

#include "cuda/mma.cuh"

namespace strata {

// Whether this pass of the compiler is for a device that has them.
#if defined(STRATA_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define STRATA_GROUPS 1
#else
#define STRATA_GROUPS 0
#endif

inline constexpr int kGroupAlignment = 1024;  // of operands in shared memory

#if STRATA_GROUPS

// What the matrix unit is told of 64 rows of 128 bytes, swizzled as SwizzledAt; `k` bytes in (PTX
// ISA, "Matrix-descriptor": 128-byte swizzle, 8 rows of it are 1024 bytes).
__device__ __forceinline__ uint64_t GroupOperand(const uint8_t* rows, int k) {
#if defined(STRATA_EMULATE)
  return reinterpret_cast<uint64_t>(rows) + static_cast<uint64_t>(k);
#else
  const uint64_t at = static_cast<uint64_t>(__cvta_generic_to_shared(rows)) + k;
  return (at & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
#endif
}

// Before the group's first product of registers that it wrote itself.
__device__ __forceinline__ void GroupFence() {
#if !defined(STRATA_EMULATE)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// What a thread wrote to shared memory, or had copied there, becomes visible to the matrix units;
// for other threads' after a barrier.
__device__ __forceinline__ void PublishToUnits() {
#if !defined(STRATA_EMULATE)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Begins d = A B for 64 rows and 64 columns of 32 values: d[j] as mma.cuh's for columns 8j.. and
// 16 rows a warp. All of the group's threads must call; d arrives by WaitForSums.
__device__ __forceinline__ void BeginGroupMma(int (&d)[8][4], uint64_t rows, uint64_t columns) {
#if defined(STRATA_EMULATE)
  emulate::GroupMmaS8(d, rows, columns);
#else
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
      "%10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p;\n}\n"
      "wgmma.commit_group.sync.aligned;"
      : "=r"(d[0][0]), "=r"(d[0][1]), "=r"(d[0][2]), "=r"(d[0][3]), "=r"(d[1][0]), "=r"(d[1][1]),
        "=r"(d[1][2]), "=r"(d[1][3]), "=r"(d[2][0]), "=r"(d[2][1]), "=r"(d[2][2]), "=r"(d[2][3]),
        "=r"(d[3][0]), "=r"(d[3][1]), "=r"(d[3][2]), "=r"(d[3][3]), "=r"(d[4][0]), "=r"(d[4][1]),
        "=r"(d[4][2]), "=r"(d[4][3]), "=r"(d[5][0]), "=r"(d[5][1]), "=r"(d[5][2]), "=r"(d[5][3]),
        "=r"(d[6][0]), "=r"(d[6][1]), "=r"(d[6][2]), "=r"(d[6][3]), "=r"(d[7][0]), "=r"(d[7][1]),
        "=r"(d[7][2]), "=r"(d[7][3])
      : "l"(rows), "l"(columns), "r"(0)
      : "memory");
#endif
}

// Waits for all products but the kPending newest, of which d is none.
template <int kPending>
__device__ __forceinline__ void WaitForSums(int (&d)[8][4]) {
#if defined(STRATA_EMULATE)
  (void)d;
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(d[j][e])::"memory");
  }
#endif
}

// The first multiple of kGroupAlignment in a block's dynamic shared memory.
__device__ __forceinline__ uint8_t* AlignForGroups(uint8_t* shared) {
#if defined(STRATA_EMULATE)
  return shared;
#else
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  return shared + (0u - at) % kGroupAlignment;
#endif
}

#endif  // STRATA_GROUPS

}  // namespace strata
