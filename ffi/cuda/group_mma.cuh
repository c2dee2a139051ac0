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

// The operand `bytes` further on, a multiple of 16.
__device__ __forceinline__ uint64_t AdvanceOperand(uint64_t operand, int bytes) {
#if defined(STRATA_EMULATE)
  return operand + static_cast<uint64_t>(bytes);
#else
  return operand + static_cast<uint64_t>(bytes / 16);
#endif
}

// Before the group's first product of registers that it wrote itself.
__device__ __forceinline__ void GroupFence() {
#if defined(STRATA_EMULATE)
  emulate::GroupFence();
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// What a thread wrote to shared memory, or had copied there, becomes visible to the matrix units;
// for other threads' after a barrier.
__device__ __forceinline__ void PublishToUnits() {
#if defined(STRATA_EMULATE)
  emulate::PublishToUnits();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Begins d = A B for 64 rows, some columns and 32 values: d[j] as mma.cuh's for columns 8j.. and 16
// rows a warp. All of the group's threads must call; d arrives by WaitForSums.
#if defined(STRATA_EMULATE)
template <int kGroupsOfColumns>
void BeginGroupMma(int (&d)[kGroupsOfColumns][4], uint64_t rows, uint64_t columns) {
  emulate::BeginGroupMma(&d[0][0], 8 * kGroupsOfColumns, rows, columns);
}
#else
// The operands' numbers follow those of the results, which the text has to count.
#define STRATA_GROUP_MMA(columns, results, a, b, zero, ...)                                   \
  __device__ __forceinline__ void BeginGroupMma(int (&d)[columns / 8][4], uint64_t left,      \
                                                uint64_t right) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " zero                                     \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8 {" results \
                 "}, " a ", " b ", p;\n}\nwgmma.commit_group.sync.aligned;"                   \
                 : __VA_ARGS__                                                                \
                 : "l"(left), "l"(right), "r"(0)                                              \
                 : "memory");                                                                 \
  }
#define STRATA_SUMS(j) "=r"(d[j][0]), "=r"(d[j][1]), "=r"(d[j][2]), "=r"(d[j][3])
#define STRATA_RESULTS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define STRATA_RESULTS_32 STRATA_RESULTS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define STRATA_RESULTS_48 STRATA_RESULTS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define STRATA_RESULTS_64 STRATA_RESULTS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define STRATA_RESULTS_80 STRATA_RESULTS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
STRATA_GROUP_MMA(16, STRATA_RESULTS_16, "%8", "%9", "%10", STRATA_SUMS(0), STRATA_SUMS(1))
STRATA_GROUP_MMA(32, STRATA_RESULTS_32, "%16", "%17", "%18", STRATA_SUMS(0), STRATA_SUMS(1),
                 STRATA_SUMS(2), STRATA_SUMS(3))
STRATA_GROUP_MMA(48, STRATA_RESULTS_48, "%24", "%25", "%26", STRATA_SUMS(0), STRATA_SUMS(1),
                 STRATA_SUMS(2), STRATA_SUMS(3), STRATA_SUMS(4), STRATA_SUMS(5))
STRATA_GROUP_MMA(64, STRATA_RESULTS_64, "%32", "%33", "%34", STRATA_SUMS(0), STRATA_SUMS(1),
                 STRATA_SUMS(2), STRATA_SUMS(3), STRATA_SUMS(4), STRATA_SUMS(5), STRATA_SUMS(6),
                 STRATA_SUMS(7))
STRATA_GROUP_MMA(80, STRATA_RESULTS_80, "%40", "%41", "%42", STRATA_SUMS(0), STRATA_SUMS(1),
                 STRATA_SUMS(2), STRATA_SUMS(3), STRATA_SUMS(4), STRATA_SUMS(5), STRATA_SUMS(6),
                 STRATA_SUMS(7), STRATA_SUMS(8), STRATA_SUMS(9))
#undef STRATA_RESULTS_16
#undef STRATA_RESULTS_32
#undef STRATA_RESULTS_48
#undef STRATA_RESULTS_64
#undef STRATA_RESULTS_80
#undef STRATA_SUMS
#undef STRATA_GROUP_MMA
#endif

// Waits for all products but the kPending newest, of which d is none.
template <int kPending, int kGroupsOfColumns>
__device__ __forceinline__ void WaitForSums(int (&d)[kGroupsOfColumns][4]) {
#if defined(STRATA_EMULATE)
  emulate::WaitForSums(&d[0][0], kPending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int j = 0; j < kGroupsOfColumns; ++j) {
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
