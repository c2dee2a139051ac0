#include <algorithm>

#include "cuda/ops/quant_matmul.h"
#include "cuda/ops/route.h"
#include "cuda/ops/router_topk.cuh"
#include "cuda/ops/router_topk.h"
#include "cuda/products.cuh"
#include "cuda/reduce.cuh"
#include "cuda/segments_body.cuh"

namespace strata {
namespace {

constexpr int kWarps = 16;
constexpr int kItemRows = 4;  // of a matrix: a lane has one of them, and one of 8 blocks of 32
constexpr int64_t kMostShared = 96 * 1024;  // what every supported card gives a block

struct Params {
  PanelMatrix router, shared_router;
  const float* x;
  const int32_t* live;
  float* logits;  // [T, E + 1]
  int32_t* ids;
  float* weights;
  float* shared;
  int32_t num_rows;
  int32_t width;
  int32_t num_experts;
  int32_t num_active;
  int32_t num_items;  // of the router; one more is the shared expert's
};

// Blocks of the running launch that have left their logits. A launch leaves zero behind, and all
// launches of a device are on its one compute stream, so no two of them count at once.
__device__ unsigned arrivals;

template <GgmlType kType>
__device__ __forceinline__ float BlockProduct(const RawWords<32>& raw, const float* x) {
  constexpr int kWordsOfFour = kType == GgmlType::kF32 ? 4 : 2;
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 w = FourFloats<kType>(raw.words + kWordsOfFour * i);
    const float4 v = *reinterpret_cast<const float4*>(x + 4 * i);
    product = __fmaf_rn(w.x, v.x, product);
    product = __fmaf_rn(w.y, v.y, product);
    product = __fmaf_rn(w.z, v.z, product);
    product = __fmaf_rn(w.w, v.w, product);
  }
  return product;
}

// The eight blocks of a segment lie four lanes apart; they are added in ascending order.
__device__ __forceinline__ float AddSegment(float product, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    sum = __fadd_rn(sum, __shfl_sync(kAllLanes, product, lane % kItemRows + kItemRows * k));
  }
  return sum;
}

__device__ __forceinline__ float ProductOf(GgmlType type, const RawWords<32>& raw, const float* x) {
  if (type == GgmlType::kF32) return BlockProduct<GgmlType::kF32>(raw, x);
  if (type == GgmlType::kF16) return BlockProduct<GgmlType::kF16>(raw, x);
  return BlockProduct<GgmlType::kBF16>(raw, x);
}

// A lane's block of 32 values of one segment of an item.
__device__ __forceinline__ void LoadBlock(const Params& p, int item, int segment,
                                          RawWords<32>* raw) {
  const bool routed = item < p.num_items;
  const PanelMatrix& m = routed ? p.router : p.shared_router;
  const int lane = threadIdx.x % 32;
  const int row = routed ? item * kItemRows + lane % kItemRows : lane % kItemRows;
  const uint8_t* unit = m.bytes + row / 32 * m.panel_bytes + segment * m.unit_bytes;
  const int block = lane / kItemRows;
  if (m.type == GgmlType::kF32) {
    LoadWords(unit + block * (32 * 128), row % 32, raw);
    return;
  }
  RawWords<16> half;
  LoadWords(unit + block * (16 * 128), row % 32, &half);
#pragma unroll
  for (int i = 0; i < 16; ++i) raw->words[i] = half.words[i];
}

// The block's logits of all live rows, to `p.logits`. `sums` is [items, segments, rows, 4].
__device__ __forceinline__ void Logits(const Params& p, float* sums) {
  const int lane = threadIdx.x % 32;
  const int segments = p.width / 256;
  const int all = p.num_items + 1;
  const int own = (all - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                  static_cast<int>(gridDim.x);
  RawWords<32> raw;
  const int first = threadIdx.x / 32;
  const auto item_of = [&](int turn) { return static_cast<int>(blockIdx.x + turn * gridDim.x); };
  if (first < own * segments) {  // before anything is known of the activations
    LoadBlock(p, item_of(first / segments), first % segments, &raw);
  }
  WaitForKernelBefore();
  const int num_rows = LiveRows(*p.live, p.num_rows);
  for (int job = first; job < own * segments; job += kWarps) {
    const int turn = job / segments;
    const int segment = job - turn * segments;
    const int item = item_of(turn);
    if (job != first) LoadBlock(p, item, segment, &raw);
    const GgmlType type = item < p.num_items ? p.router.type : p.shared_router.type;
    const float* x = p.x + 256 * segment + 32 * (lane / kItemRows);
    for (int r = 0; r < num_rows; ++r) {
      const float product = ProductOf(type, raw, x + static_cast<int64_t>(r) * p.width);
      const float sum = AddSegment(product, lane);
      if (lane < kItemRows) sums[(job * num_rows + r) * kItemRows + lane] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < own * num_rows * kItemRows; i += blockDim.x) {
    const int row = i % kItemRows;
    const int r = i / kItemRows % num_rows;
    const int turn = i / kItemRows / num_rows;
    const int item = item_of(turn);
    const int column = item < p.num_items ? item * kItemRows + row : p.num_experts + row;
    if (column >= (item < p.num_items ? p.num_experts : p.num_experts + 1)) continue;
    float total = 0.0f;
    for (int s = 0; s < segments; ++s) {
      total = __fadd_rn(total, sums[((turn * segments + s) * num_rows + r) * kItemRows + row]);
    }
    p.logits[r * (p.num_experts + 1) + column] = total;
  }
}

// Whether this block is the last one.
__device__ __forceinline__ bool ArriveLast() {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&arrivals, 1u) + 1 == gridDim.x;
    __threadfence();
    if (is_last) arrivals = 0;
  }
  __syncthreads();
  return is_last;
}

// Experts and weights of all rows, a warp each, from logits that other blocks have written.
__device__ __forceinline__ void Choose(const Params& p, unsigned char* shared) {
  const int lane = threadIdx.x % 32;
  const int num_rows = LiveRows(*p.live, p.num_rows);
  const int columns = p.num_experts + 1;
  float* logits = reinterpret_cast<float*>(shared);
  for (int i = threadIdx.x; i < num_rows * columns; i += blockDim.x)
    logits[i] = __ldcg(p.logits + i);
  __syncthreads();
  unsigned char* scratches = shared + (p.num_rows * columns * 4 + 15) / 16 * 16;
  const auto bytes = RouterScratch::Bytes(p.num_experts, p.num_active);
  for (int r = threadIdx.x / 32; r < p.num_rows; r += kWarps) {
    int32_t* ids = p.ids + r * p.num_active;
    float* weights = p.weights + r * p.num_active;
    if (r < num_rows) {
      const float* own = logits + r * columns;
      const RouterScratch scratch(scratches + r * bytes, p.num_experts, p.num_active);
      if (lane == 0) p.shared[r] = Sigmoid(own[p.num_experts]);
      SelectExperts(own, p.num_experts, p.num_active, scratch, ids, weights);
      continue;
    }
    if (lane == 0) p.shared[r] = 0.0f;
    for (int a = lane; a < p.num_active; a += 32) {
      ids[a] = 0;
      weights[a] = 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kWarps * 32, 1) RouteKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  LetNextKernelBegin();
  Logits(p, reinterpret_cast<float*>(shared));
  if (ArriveLast()) Choose(p, shared);
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t LogitsOf(int64_t num_rows, const DeviceMatrix& router) {
  return CeilDiv(num_rows * (router.rows + 1), 4) * 4;
}

// A launch of the one kernel; no blocks where it does not serve.
Shape OneKernel(const RouteArgs& a) {
  Shape shape;
  const int64_t items = CeilDiv(a.router->rows, kItemRows) + 1;
  const int64_t blocks = std::min<int64_t>(items, Multiprocessors());
  const int64_t sums = CeilDiv(items, blocks) * (a.width / 256) * a.num_rows * kItemRows * 4;
  const int64_t scratch = static_cast<int64_t>(RouterScratch::Bytes(a.router->rows, a.num_active));
  const int64_t chosen = LogitsOf(a.num_rows, *a.router) * 4 + 16 + a.num_rows * scratch;
  const int64_t bytes = std::max(sums, chosen);
  const bool serves = a.num_rows <= kMostRows && a.width % 256 == 0 && !a.router->quantised() &&
                      !a.shared_router->quantised() && a.num_active > 0 && bytes <= kMostShared;
  shape.grid = dim3(serves ? static_cast<unsigned>(blocks) : 0);
  shape.block = dim3(32 * kWarps);
  shape.shared_bytes = static_cast<size_t>(bytes);
  return shape;
}

}  // namespace

int64_t RouteWorkspace(int64_t num_rows, const DeviceMatrix& router,
                       const DeviceMatrix& shared_router) {
  return LogitsOf(num_rows, router) + QuantMatmulWorkspace(num_rows, {&router, &shared_router});
}

std::string Route(const RouteArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return "";
  Shape shape = OneKernel(a);
  shape.stream = stream;
  if (shape.grid.x > 0) {
    Params p = {};
    p.router = ViewOf(*a.router);
    p.shared_router = ViewOf(*a.shared_router);
    p.x = a.x;
    p.live = a.live;
    p.logits = a.workspace;
    p.ids = a.ids;
    p.weights = a.weights;
    p.shared = a.shared;
    p.num_rows = static_cast<int32_t>(a.num_rows);
    p.width = static_cast<int32_t>(a.width);
    p.num_experts = static_cast<int32_t>(a.router->rows);
    p.num_active = static_cast<int32_t>(a.num_active);
    p.num_items = static_cast<int32_t>(CeilDiv(a.router->rows, kItemRows));
    return LaunchOverlapping(RouteKernel, shape, p);
  }
  float* logits = a.workspace;
  const std::string error = QuantMatmul({a.x,
                                         a.live,
                                         logits,
                                         logits + LogitsOf(a.num_rows, *a.router),
                                         a.num_rows,
                                         a.width,
                                         {a.router, a.shared_router}},
                                        stream);
  if (!error.empty()) return error;
  return RouterTopk(
      {logits, a.live, a.ids, a.weights, a.shared, a.num_rows, a.router->rows, a.num_active},
      stream);
}

}  // namespace strata
