// What the lanes of a warp get from each other once all of them have arrived.
#include <algorithm>

#include "emulate/block.h"

namespace emulate {
namespace {

constexpr uint64_t kUndefined = ~uint64_t{0};

// The lane a shuffle reads from, by the definition of PTX's shfl.sync.
int SourceLane(WarpOp op, int lane, int other, int width) {
  const int first = lane & ~(width - 1);
  const int last = first + width - 1;
  const int64_t by = static_cast<uint32_t>(other);
  int64_t source = lane;
  switch (op) {
    case WarpOp::kShuffle:
      return first + (other & (width - 1));
    case WarpOp::kUp:
      source = lane - by;
      return source >= first ? static_cast<int>(source) : lane;
    case WarpOp::kDown:
      source = lane + by;
      break;
    default:
      source = lane ^ by;
  }
  return source <= last ? static_cast<int>(source) : lane;
}

bool Moves(WarpOp op) { return op >= WarpOp::kShuffle && op <= WarpOp::kXor; }

uint64_t Combined(WarpOp op, uint64_t a, uint64_t b) {
  const uint32_t x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
  const int32_t s = static_cast<int32_t>(x), t = static_cast<int32_t>(y);
  switch (op) {
    case WarpOp::kAdd:
      return x + y;
    case WarpOp::kMin:
      return static_cast<uint32_t>(std::min(s, t));
    case WarpOp::kMax:
      return static_cast<uint32_t>(std::max(s, t));
    case WarpOp::kUMin:
      return std::min(x, y);
    case WarpOp::kUMax:
      return std::max(x, y);
    case WarpOp::kAnd:
      return x & y;
    case WarpOp::kXorAll:
      return x ^ y;
    default:
      return x | y;
  }
}

// The one result of all lanes: a ballot, a vote or a reduction. values[i] is that of the i-th lane
// of `lanes`.
uint64_t Common(WarpOp op, unsigned lanes, const uint64_t* values) {
  unsigned ballot = 0;
  bool first = true;
  uint64_t reduced = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (values[lane] != 0) ballot |= 1u << lane;
    reduced = first ? values[lane] : Combined(op, reduced, values[lane]);
    first = false;
  }
  switch (op) {
    case WarpOp::kSync:
      return 0;
    case WarpOp::kBallot:
      return ballot;
    case WarpOp::kAny:
      return ballot != 0;
    case WarpOp::kAll:
      return ballot == lanes;
    default:
      return reduced;
  }
}

unsigned Matching(unsigned lanes, const uint64_t* values, uint64_t value) {
  unsigned matching = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (values[lane] == value) matching |= 1u << lane;
  }
  return matching;
}

}  // namespace

void Block::Finish(int warp_index, int group_index) {
  Warp& warp = warps_[warp_index];
  const Group group = warp.groups[group_index];
  warp.groups[group_index] = warp.groups[--warp.num_groups];
  Thread* threads = threads_.data() + warp_index * 32;
  uint64_t values[32];
  for (unsigned rest = group.arrived; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    values[lane] = threads[lane].value;
  }
  const bool each = Moves(group.op) || group.op == WarpOp::kMatch;
  const uint64_t common = each ? 0 : Common(group.op, group.arrived, values);
  for (unsigned rest = group.arrived; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Thread& thread = threads[lane];
    if (Moves(group.op)) {
      const int source = SourceLane(group.op, lane, thread.other, thread.width);
      thread.value = (group.arrived >> source & 1) != 0 ? values[source] : kUndefined;
    } else if (group.op == WarpOp::kMatch) {
      thread.value = Matching(group.arrived, values, values[lane]);
    } else {
      thread.value = common;
    }
    thread.waits = false;
    SetReady(warp_index * 32 + lane, true);
  }
}

}  // namespace emulate
