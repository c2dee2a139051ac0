#include <algorithm>

#include "cuda/ops/qsa_append.h"
#include "cuda/ops/qsa_cells.cuh"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

constexpr int kWarps = 4;
constexpr int kSteps = 8;  // loads of a lane that are under way at once

// What a warp does; a row has a run of jobs of each kind, in this order.
enum class Kind { kQuery, kKey, kValue, kIndexQuery, kIndexRaw, kPool, kNone };

struct Job {
  Kind kind;
  int head;
};

__device__ Job JobAt(const QsaAppendArgs& a, int place) {
  if (place < a.num_heads) return {Kind::kQuery, place};
  place -= a.num_heads;
  if (place < a.num_kv_heads) return {Kind::kKey, place};
  place -= a.num_kv_heads;
  if (place < a.num_kv_heads) return {Kind::kValue, place};
  place -= a.num_kv_heads;
  if (place < a.index_heads) return {Kind::kIndexQuery, place};
  place -= a.index_heads;
  if (a.index_heads == 0 || place > 1) return {Kind::kNone, 0};
  return {place == 0 ? Kind::kIndexRaw : Kind::kPool, 0};
}

__device__ int ProjWidth(const QsaAppendArgs& a) {
  return 2 * (a.num_heads + a.num_kv_heads) * a.head_dim +
         (a.index_heads > 0 ? (a.index_heads + 1) * a.index_dim : 0);
}

// Where a job's values stand in their row of proj.
__device__ int Column(const QsaAppendArgs& a, Job job) {
  const int keys = 2 * a.num_heads * a.head_dim;
  const int values = keys + a.num_kv_heads * a.head_dim;
  const int index = values + a.num_kv_heads * a.head_dim;
  switch (job.kind) {
    case Kind::kQuery:
      return 2 * job.head * a.head_dim;
    case Kind::kKey:
      return keys + job.head * a.head_dim;
    case Kind::kValue:
      return values + job.head * a.head_dim;
    case Kind::kIndexQuery:
      return index + job.head * a.index_dim;
    default:
      return index + a.index_heads * a.index_dim;
  }
}

// A warp's own shared memory.
struct Scratch {
  float* x;      // [width]  a head's values
  float* gamma;  // [width]
  float* turn;   // [R]  frequencies; then cos of every pair, then sin
};

// to[i] <- from(i) by the lanes of a warp, kSteps loads of each under way before the first is used.
template <typename From, typename To>
__device__ __forceinline__ void Spread(int lane, int count, From from, To to) {
  for (int begin = lane; begin < count; begin += 32 * kSteps) {
    decltype(from(0)) x[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int i = begin + 32 * s;
      if (i < count) x[s] = from(i);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int i = begin + 32 * s;
      if (i < count) to(i, x[s]);
    }
  }
}

// A head, its norm's weight and the frequencies into shared memory; `from` gives value i. A lane
// fetches what it will use, as far as NormRotate's first barrier.
template <typename From>
__device__ __forceinline__ void Fetch(const QsaAppendArgs& a, int lane, int dim, From from,
                                      const float* weight, const Scratch& scratch) {
  const int half = a.rotated / 2;
  const float* inv_freq = a.inv_freq;
  Spread(
      lane, dim,
      [&](int i) { return make_float3(from(i), weight[i], i < half ? inv_freq[i] : 0.0f); },
      [&](int i, float3 all) {
        scratch.x[i] = all.x;
        scratch.gamma[i] = all.y;
        if (i < half) scratch.turn[i] = all.z;
      });
}

// scratch.x <- rotate(x / rms * gamma) for the head at `position`, all lanes together.
__device__ __forceinline__ void NormRotate(const QsaAppendArgs& a, int lane, int dim, int position,
                                           const Scratch& scratch) {
  const int half = a.rotated / 2;
  for (int j = lane; j < half; j += 32) {
    // The angle reaches 262,144 rad: the functions that reduce it exactly.
    const float angle = static_cast<float>(position) * scratch.turn[j];
    scratch.turn[j] = cosf(angle);
    scratch.turn[half + j] = sinf(angle);
  }
  float sum = 0.0f;
  for (int i = lane; i < dim; i += 32) sum = __fmaf_rn(scratch.x[i], scratch.x[i], sum);
  const float scale = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(dim) + a.eps);
  for (int i = lane; i < dim; i += 32) scratch.x[i] = scratch.x[i] * scale * scratch.gamma[i];
  __syncwarp();
  for (int j = lane; j < half; j += 32) {
    const float cosine = scratch.turn[j], sine = scratch.turn[half + j];
    const float low = scratch.x[j], high = scratch.x[half + j];
    scratch.x[j] = low * cosine - high * sine;
    scratch.x[half + j] = high * cosine + low * sine;
  }
  __syncwarp();
}

// The block that row t completes, if it does: the mean of its raw keys, normed and rotated at the
// position of its first token. Cells of this window come from proj, since other warps are writing
// them; older ones from the cache.
__device__ void PoolBlock(const QsaAppendArgs& a, int lane, int t, int pos, int origin,
                          const float* raw, const Scratch& scratch) {
  const int end = pos + t + 1;
  if (end % a.ratio != 0) return;
  const int width = ProjWidth(a), dim = a.index_dim;
  for (int begin = lane; begin < dim; begin += 32 * kSteps) {
    float sum[kSteps] = {};
#pragma unroll 4
    for (int cell = end - a.ratio; cell < end; ++cell) {
      const int back = end - 1 - cell;  // rows before row t
      const float* from = back <= t ? raw - static_cast<int64_t>(back) * width
                                    : a.index_raw + static_cast<int64_t>(cell) * dim;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (begin + 32 * s < dim) sum[s] += from[begin + 32 * s];
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (begin + 32 * s < dim) scratch.x[begin + 32 * s] = sum[s] / static_cast<float>(a.ratio);
    }
  }
  const auto mean = [&](int i) { return scratch.x[i]; };
  Fetch(a, lane, dim, mean, a.index_k_norm, scratch);
  NormRotate(a, lane, a.index_dim, origin + end - a.ratio, scratch);
  const int block = end / a.ratio - 1;
  float* to = a.index_keys + static_cast<int64_t>(block / 16) * a.index_dim * 16 + block % 16;
  for (int i = lane; i < a.index_dim; i += 32) to[static_cast<int64_t>(i) * 16] = scratch.x[i];
}

template <typename Stored>
__global__ void __launch_bounds__(32 * kWarps)
    AppendKernel(const __grid_constant__ QsaAppendArgs a) {
  STRATA_SHARED(float, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int t = blockIdx.y;
  const Job job = JobAt(a, blockIdx.x * kWarps + warp);
  if (job.kind == Kind::kNone) return;
  const int live = *a.live, pos = *a.pos, origin = *a.origin;
  const int dim = job.kind < Kind::kIndexQuery ? a.head_dim : a.index_dim;
  const float* from = a.proj + static_cast<int64_t>(t) * ProjWidth(a) + Column(a, job);
  float* own = shared + warp * (2 * max(a.head_dim, a.index_dim) + a.rotated);
  const Scratch scratch = {own, own + dim, own + 2 * dim};
  // Dead rows, and rows past the cache, which the engine never makes.
  const bool dead = t >= live || pos < 0 || pos >= a.num_cells - t;
  const auto read = [&](int i) { return from[i]; };
  if (job.kind == Kind::kQuery || job.kind == Kind::kIndexQuery) {
    const bool main = job.kind == Kind::kQuery;
    float* to = main ? a.q + (static_cast<int64_t>(t) * a.num_heads + job.head) * dim
                     : a.index_q + (static_cast<int64_t>(t) * a.index_heads + job.head) * dim;
    // Read before `live` is known, so that one wait covers both.
    Fetch(a, lane, dim, read, main ? a.q_norm : a.index_q_norm, scratch);
    NormRotate(a, lane, dim, origin + pos + t, scratch);
    for (int i = lane; i < dim; i += 32) to[i] = dead ? 0.0f : scratch.x[i];
    return;
  }
  if (dead) return;
  const int64_t head = static_cast<int64_t>(pos + t) * a.num_kv_heads + job.head;
  const int groups = GroupsOf(dim);
  float* scales = a.cells.scales + head * 2 * groups;          // not looked at unless there are any
  const auto own_value = [&](int i) { return scratch.x[i]; };  // the lane's i are its own
  switch (job.kind) {
    case Kind::kKey:
      Fetch(a, lane, dim, read, a.k_norm, scratch);
      NormRotate(a, lane, dim, origin + pos + t, scratch);
      StoreHead(Stored(), lane, dim, own_value, a.cells.keys, head * dim, scales);
      break;
    case Kind::kValue:
      Spread(lane, dim, read, [&](int i, float x) { scratch.x[i] = x; });
      StoreHead(Stored(), lane, dim, own_value, a.cells.values, head * dim, scales + groups);
      break;
    case Kind::kIndexRaw:
      Spread(lane, dim, read,
             [&](int i, float x) { a.index_raw[static_cast<int64_t>(pos + t) * dim + i] = x; });
      break;
    default:
      PoolBlock(a, lane, t, pos, origin, from, scratch);
  }
}

}  // namespace

std::string QsaAppend(const QsaAppendArgs& args, cudaStream_t stream) {
  const int jobs =
      args.num_heads + 2 * args.num_kv_heads + args.index_heads + (args.index_heads > 0 ? 2 : 0);
  const int width = 2 * std::max(args.head_dim, args.index_dim) + args.rotated;
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>((jobs + kWarps - 1) / kWarps),
                    static_cast<unsigned>(args.num_rows));
  shape.block = dim3(32 * kWarps);
  shape.shared_bytes = static_cast<size_t>(kWarps) * width * sizeof(float);
  shape.stream = stream;
  switch (args.cells.type) {
    case CellType::kFloat32:
      return Launch(AppendKernel<Float32Cells>, shape, args);
    case CellType::kFloat16:
      return Launch(AppendKernel<Float16Cells>, shape, args);
    default:
      return Launch(AppendKernel<Int8Cells>, shape, args);
  }
}

}  // namespace strata
