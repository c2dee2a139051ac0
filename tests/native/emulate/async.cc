#include "emulate/async.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "emulate/block.h"
#include "emulate/cuda.h"
#include "emulate/float_products.h"

namespace emulate {
namespace {

constexpr int kChunk = 16;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};

struct Product {
  int* d;
  int num_columns;
  uint64_t rows, columns;
  Place place;
};

struct Waits {
  std::vector<Copy> copies;       // in order
  std::vector<size_t> groups;     // how many of them each closed group ends with
  std::vector<Product> products;  // in order
  FloatProducts floats;
  Place newest;               // where it began the newest of these
  uint32_t publications = 1;  // since the process began
  bool is_fenced = false;

  // Makes the first `count` copies.
  void Make(size_t count, int thread);
};

// Whose copy a chunk of shared memory has last come by, and after how many publications of that
// thread: the matrix units may read it where there were more.
struct Origin {
  int thread = 0;
  uint32_t publications = 0;
};

std::array<Waits, kMostThreads> waits;
std::array<Origin, kMostSharedBytes / kChunk> origins;

// The chunk's place among those of the block's dynamic shared memory; null outside of it.
Origin* OriginOf(uint64_t address) {
  const uint64_t at = address - reinterpret_cast<uint64_t>(DynamicShared());
  return at < kMostSharedBytes ? &origins[at / kChunk] : nullptr;
}

void Waits::Make(size_t count, int thread) {
  for (size_t i = 0; i < count; ++i) {
    const Copy& copy = copies[i];
    if (copy.valid) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
    Origin* origin = OriginOf(reinterpret_cast<uint64_t>(copy.to));
    if (origin != nullptr) *origin = {thread, publications};
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<ptrdiff_t>(count));
  for (size_t& end : groups) end -= std::min(end, count);
}

Waits& Own() { return waits[TheBlock().current()]; }

// Where a row's chunk that holds byte `operand % 128 + 16 * number` lies. A tile begins at a
// multiple of its 128 bytes a row.
uint64_t ChunkAt(uint64_t operand, int row, int number) {
  const uint64_t chunk = operand % 128 / kChunk + static_cast<uint64_t>(number);
  return operand / 128 * 128 + static_cast<uint64_t>(row) * 128 +
         ((chunk ^ static_cast<uint64_t>(row)) & 7) * kChunk;
}

// The two chunks of a row's 32 values.
struct Values {
  int words[8];

  Values(uint64_t operand, int row, const Place& place) {
    for (int i = 0; i < 2; ++i) {
      std::memcpy(words + 4 * i, ForUnits(ChunkAt(operand, row, i), place), kChunk);
    }
  }
};

void Multiply(const Product& p) {
  const int thread = TheBlock().current() % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const Values rows[2] = {Values(p.rows, row, p.place), Values(p.rows, row + 8, p.place)};
  for (int n = 0; n < p.num_columns / 2; n += 4) {
    for (int c = 0; c < 2; ++c) {
      const Values column(p.columns, n / 4 * 8 + thread % 4 * 2 + c, p.place);
      for (int r = 0; r < 2; ++r) {
        int sum = 0;
        for (int i = 0; i < 8; ++i) sum = __dp4a(rows[r].words[i], column.words[i], sum);
        p.d[n + 2 * r + c] = sum;
      }
    }
  }
}

}  // namespace

void CopyAsync(void* to, const void* from, int bytes, bool valid, Place place) {
  const auto low = static_cast<uintptr_t>(bytes - 1);
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & low) != 0) {
    Fail("an asynchronous copy that is not aligned to its bytes", place);
  }
  std::memset(to, 0xff, bytes);
  Waits& own = Own();
  own.copies.push_back({to, from, bytes, valid});
  own.newest = place;
}

void WaitForCopies() {
  Waits& own = Own();
  own.Make(own.copies.size(), TheBlock().current());
  own.groups.clear();
}

void EndCopyGroup() {
  Waits& own = Own();
  own.groups.push_back(own.copies.size());
}

void WaitForGroups(int last) {
  Waits& own = Own();
  const int done = static_cast<int>(own.groups.size()) - last;
  if (done <= 0) return;
  own.Make(own.groups[done - 1], TheBlock().current());
  own.groups.erase(own.groups.begin(), own.groups.begin() + done);
}

void PublishToUnits() { ++Own().publications; }

void GroupFence() { Own().is_fenced = true; }

void BeginGroupMma(int* d, int num_columns, uint64_t rows, uint64_t columns, Place place) {
  Waits& own = Own();
  if (!own.is_fenced) Fail("a product with no fence behind the use of registers", place);
  std::fill_n(d, num_columns / 2, kNotThere);
  own.products.push_back({d, num_columns, rows, columns, place});
  own.newest = place;
}

void WaitForSums(const int* d, int pending, Place place) {
  YieldIfShuffled();
  Waits& own = Own();
  const auto done = static_cast<ptrdiff_t>(own.products.size()) - pending;
  if (done > 0) {
    for (ptrdiff_t i = 0; i < done; ++i) Multiply(own.products[static_cast<size_t>(i)]);
    own.products.erase(own.products.begin(), own.products.begin() + done);
  }
  for (const Product& product : own.products) {
    if (product.d == d) Fail("sums of a product that is not waited for", place);
  }
  own.is_fenced = false;
}

const void* ForUnits(uint64_t address, const Place& place) {
  const Origin* origin = OriginOf(address);
  if (origin != nullptr && origin->publications == waits[origin->thread].publications) {
    Fail("a product of bytes that were copied and not published to the units", place);
  }
  return reinterpret_cast<const void*>(address);
}

void BeginGroupMma(float* d, int num_columns, uint64_t rows, uint64_t columns, Place place) {
  Waits& own = Own();
  if (!own.is_fenced) Fail("a product with no fence behind the use of registers", place);
  own.floats.Begin(d, num_columns, rows, columns, place);
  own.newest = place;
}

void BeginGroupMma(float* d, int num_columns, const uint32_t (&a)[4], uint64_t columns,
                   Place place) {
  Waits& own = Own();
  if (!own.is_fenced) Fail("a product with no fence behind the use of registers", place);
  own.floats.Begin(d, num_columns, a, columns, place);
  own.newest = place;
}

void EndProducts() { Own().floats.End(); }

void WaitForProducts(int pending) {
  YieldIfShuffled();
  Own().floats.Wait(pending);
  Own().is_fenced = false;
}

const Place* NotWaitedFor() {
  Waits& own = Own();
  own.groups.clear();
  own.is_fenced = false;
  ++own.publications;  // of a block that is over
  if (!own.copies.empty() || !own.products.empty() || !own.floats.empty()) return &own.newest;
  return TheBlock().IsLast() ? BulkNotWaitedFor() : nullptr;
}

void ForgetWaits() {
  for (Waits& each : waits) {
    each.copies.clear();
    each.groups.clear();
    each.products.clear();
    each.floats.Clear();
    each.is_fenced = false;
    ++each.publications;
  }
  ForgetBulkCopies();
}

}  // namespace emulate
