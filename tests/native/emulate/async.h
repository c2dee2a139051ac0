// What a thread begins and waits for later: copies to shared memory (cuda/mma.cuh,
// cuda/async_copy.cuh) and products of groups of four warps (cuda/group_mma.cuh,
// cuda/group_mma_floats.cuh); and what others do, at barriers in shared memory (cuda/barriers.cuh).
//
// Copies and products are done when they are waited for, the later the better for finding code that
// does not wait; until then the bytes of a copy are 0xFF, and a product's sums are kNotThere. A
// thread that ends with something it did not wait for ends the launch with an error. So does a
// product of bytes that were copied and not published to the matrix units: what a thread stores
// there by itself cannot be seen, but one fence serves both.
#pragma once

#include <cstdint>

#include "emulate/sync.h"

namespace emulate {

inline constexpr int kNotThere = 0x5bad5bad;

// `bytes`, 4 or 16, to which both addresses are aligned; zeros where not `valid`.
void CopyAsync(void* to, const void* from, int bytes, bool valid, Place place = {});
void WaitForCopies();
void EndCopyGroup();
void WaitForGroups(int last);

// What the thread's copies have brought so far is there for the matrix units.
void PublishToUnits();
// Registers that the thread has used may be a product's: once before the first product, and after
// every wait.
void GroupFence();
// Begins a product of 64 rows and some columns, d[num_columns / 2]: the operands are addresses of
// rows of 128 bytes, plus the first byte in a row; read from where cuda/mma.cuh's SwizzledAt puts a
// row's chunks.
void BeginGroupMma(int* d, int num_columns, uint64_t rows, uint64_t columns, Place place = {});
// Waits for all products but the `pending` newest, of which d is none.
void WaitForSums(const int* d, int pending, Place place = {});

// The same for floats, d += A B for 16 values: addresses of A's 64 rows and B's columns, and in the
// highest 16 bits the bytes from one chunk of 8 values of all to the next. d is a NaN until all of
// its products are made.
void BeginGroupMma(float* d, int num_columns, uint64_t rows, uint64_t columns, Place place = {});
// With A in registers, which stay as they are until then.
void BeginGroupMma(float* d, int num_columns, const uint32_t (&a)[4], uint64_t columns,
                   Place place = {});
void EndProducts();
void WaitForProducts(int pending);

// Where the matrix units read a chunk of 16 bytes.
const void* ForUnits(uint64_t address, const Place& place);

struct Barrier {
  int32_t expected;
  int32_t arrived;
  uint32_t phase;
  int32_t bytes;  // on their way
};

void ArriveAtBarrier(Barrier* barrier);
// Arrives, too; the phase ends when `bytes` have come besides.
void ExpectBytesAtBarrier(Barrier* barrier, int bytes);
// A copy that is made when somebody waits at the barrier; all must be when a block ends.
void CopyToBarrier(void* to, const void* from, int bytes, Barrier* barrier, Place place = {});
// A wait while all of the block's threads wait so ends the launch with an error.
void AwaitBarrier(const Barrier* barrier, unsigned parity, Place place = {});
const Place* BulkNotWaitedFor();
void ForgetBulkCopies();

// Where the current thread, which is to end, began what it has not waited for; null if nothing.
const Place* NotWaitedFor();
// Forgets what threads have begun, after an error.
void ForgetWaits();

}  // namespace emulate
