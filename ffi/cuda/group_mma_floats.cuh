// Products of groups of four warps (group_mma.cuh) for bfloat16: operands in shared memory, as
// panels have them, the left one in registers if need be, and float sums that go on.
#pragma once

#include "cuda/barriers.cuh"
#include "cuda/group_mma.cuh"

namespace strata {

#if STRATA_GROUPS

// What the matrix unit is told of columns of the right operand in shared memory, [chunk of 8
// values][column][16 bytes], chunks `line` bytes apart (PTX ISA, "Matrix-descriptor": no swizzle; 8
// columns of a chunk follow one another).
__device__ __forceinline__ uint64_t ColumnsOperand(const uint8_t* columns, int line) {
#if defined(STRATA_EMULATE)
  return reinterpret_cast<uint64_t>(columns) | static_cast<uint64_t>(line) << 48;
#else
  const uint64_t at = static_cast<uint64_t>(__cvta_generic_to_shared(columns));
  return (at & 0x3ffff) >> 4 | static_cast<uint64_t>(line >> 4) << 16 | uint64_t{128 >> 4} << 32;
#endif
}

// Begins d += A B for 64 rows, some columns and 16 values, d[j] as mma.cuh's for columns 8j.. and a
// warp's 16 rows; the rows lie as the columns. All of the group's threads must call. Until the wait
// for it d stays untouched but by further products into d, which are made in order.
#if defined(STRATA_EMULATE)
template <int kGroupsOfColumns>
void BeginGroupMma(float (&d)[kGroupsOfColumns][4], uint64_t rows, uint64_t columns) {
  emulate::BeginGroupMma(&d[0][0], 8 * kGroupsOfColumns, rows, columns);
}

// The same with a warp's 16 rows in registers, as mma.cuh's A; they stay untouched, too.
template <int kGroupsOfColumns>
void BeginGroupMma(float (&d)[kGroupsOfColumns][4], const uint32_t (&a)[4], uint64_t columns) {
  emulate::BeginGroupMma(&d[0][0], 8 * kGroupsOfColumns, a, columns);
}
#else
// The operands' numbers follow those of the results, which the text has to count.
#define STRATA_GROUP_MMA(columns, results, left, right, ...)                                \
  __device__ __forceinline__ void BeginGroupMma(float (&d)[columns / 8][4], uint64_t rows,  \
                                                uint64_t operand) {                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" results \
                 "}, " left ", " right ", 1, 1, 1, 0, 0;"                                   \
                 : __VA_ARGS__                                                              \
                 : "l"(rows), "l"(operand)                                                  \
                 : "memory");                                                               \
  }
#define STRATA_GROUP_MMA_OF_REGISTERS(columns, results, left, right, ...)                   \
  __device__ __forceinline__ void BeginGroupMma(float (&d)[columns / 8][4],                 \
                                                const uint32_t (&a)[4], uint64_t operand) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" results \
                 "}, {" left "}, " right ", 1, 1, 1, 0;"                                    \
                 : __VA_ARGS__                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand)                 \
                 : "memory");                                                               \
  }
#define STRATA_SUMS(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define STRATA_SUMS_4(j) STRATA_SUMS(j), STRATA_SUMS(j + 1), STRATA_SUMS(j + 2), STRATA_SUMS(j + 3)
#define STRATA_SUMS_20 \
  STRATA_SUMS_4(0), STRATA_SUMS_4(4), STRATA_SUMS_4(8), STRATA_SUMS_4(12), STRATA_SUMS_4(16)
#define STRATA_RESULTS_16            \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define STRATA_RESULTS_32                    \
  STRATA_RESULTS_16                          \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define STRATA_RESULTS_48                    \
  STRATA_RESULTS_32                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define STRATA_RESULTS_64                    \
  STRATA_RESULTS_48                          \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define STRATA_RESULTS_80                    \
  STRATA_RESULTS_64                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79"
#define STRATA_RESULTS_96                    \
  STRATA_RESULTS_80                          \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define STRATA_RESULTS_112                       \
  STRATA_RESULTS_96                              \
  ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111"
#define STRATA_RESULTS_128                           \
  STRATA_RESULTS_112                                 \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
STRATA_GROUP_MMA(32, STRATA_RESULTS_16, "%16", "%17", STRATA_SUMS_4(0))
STRATA_GROUP_MMA(40, STRATA_RESULTS_16 ", %16, %17, %18, %19", "%20", "%21", STRATA_SUMS_4(0),
                 STRATA_SUMS(4))
STRATA_GROUP_MMA(160, STRATA_RESULTS_80, "%80", "%81", STRATA_SUMS_20)
STRATA_GROUP_MMA(168, STRATA_RESULTS_80 ", %80, %81, %82, %83", "%84", "%85", STRATA_SUMS_20,
                 STRATA_SUMS(20))
STRATA_GROUP_MMA(256, STRATA_RESULTS_128, "%128", "%129", STRATA_SUMS_20, STRATA_SUMS_4(20),
                 STRATA_SUMS_4(24), STRATA_SUMS_4(28))
STRATA_GROUP_MMA_OF_REGISTERS(96, STRATA_RESULTS_48, "%48, %49, %50, %51", "%52", STRATA_SUMS_4(0),
                              STRATA_SUMS_4(4), STRATA_SUMS_4(8))
STRATA_GROUP_MMA_OF_REGISTERS(176, STRATA_RESULTS_80 ", %80, %81, %82, %83, %84, %85, %86, %87",
                              "%88, %89, %90, %91", "%92", STRATA_SUMS_20, STRATA_SUMS(20),
                              STRATA_SUMS(21))
STRATA_GROUP_MMA_OF_REGISTERS(192, STRATA_RESULTS_96, "%96, %97, %98, %99", "%100", STRATA_SUMS_20,
                              STRATA_SUMS_4(20))
#undef STRATA_RESULTS_16
#undef STRATA_RESULTS_32
#undef STRATA_RESULTS_48
#undef STRATA_RESULTS_64
#undef STRATA_RESULTS_80
#undef STRATA_RESULTS_96
#undef STRATA_RESULTS_112
#undef STRATA_RESULTS_128
#undef STRATA_SUMS_20
#undef STRATA_SUMS_4
#undef STRATA_SUMS
#undef STRATA_GROUP_MMA_OF_REGISTERS
#undef STRATA_GROUP_MMA
#endif

// Closes what the group has begun, for WaitForProducts.
__device__ __forceinline__ void EndProducts() {
#if defined(STRATA_EMULATE)
  emulate::EndProducts();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for all that was closed but the kPending newest.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
#if defined(STRATA_EMULATE)
  emulate::WaitForProducts(kPending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Behind the wait: the compiler must not take the registers of a left operand for others, or know
// the values of sums, before.
__device__ __forceinline__ void HoldOperand(uint32_t (&a)[4]) {
#if !defined(STRATA_EMULATE)
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
#else
  (void)a;
#endif
}
template <int kGroupsOfColumns>
__device__ __forceinline__ void HoldSums(float (&d)[kGroupsOfColumns][4]) {
#if !defined(STRATA_EMULATE)
#pragma unroll
  for (int j = 0; j < kGroupsOfColumns; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
  }
#else
  (void)d;
#endif
}

#endif  // STRATA_GROUPS

// Bytes of a phase that copies bring, announced by one thread's arrival at the barrier.
__device__ __forceinline__ void ExpectBytes(Barrier* barrier, int bytes) {
#if defined(STRATA_EMULATE)
  emulate::ExpectBytesAtBarrier(barrier, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(barrier))),
               "r"(bytes)
               : "memory");
#endif
}

// Begins a copy of memory of this device by one thread: a multiple of 16 bytes, both ends aligned.
// Who waits for the barrier's phase has them, and the matrix units, too.
__device__ __forceinline__ void CopyBulk(uint8_t* to, const uint8_t* from, int bytes,
                                         Barrier* barrier) {
#if defined(STRATA_EMULATE)
  emulate::CopyToBarrier(to, from, bytes, barrier);
#elif __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes), "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
      : "memory");
#endif
}

}  // namespace strata
