#include "cuda/ops/router_topk.cuh"
#include "cuda/ops/router_topk.h"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

// A warp a row.
__global__ void __launch_bounds__(32) RouterTopkKernel(const RouterTopkArgs a) {
  STRATA_SHARED(unsigned char, bytes);
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x;
  const int num_experts = static_cast<int>(a.num_experts);
  const int num_active = static_cast<int>(a.num_active);
  const float* logits = a.logits + t * (num_experts + 1);
  int32_t* ids = a.ids + t * num_active;
  float* weights = a.weights + t * num_active;
  const RouterScratch scratch(bytes, num_experts, num_active);
  // Dead rows are ordered too: their logits are there, and this way nothing waits for `live` first.
  const int asked_live = *a.live;
  const float shared_logit = logits[num_experts];
  const ExpertKey best = OrderLogits(logits, num_experts, lane, scratch);
  const bool is_live = t < LiveRows(asked_live, a.num_rows);
  if (lane == 0) a.shared[t] = is_live ? Sigmoid(shared_logit) : 0.0f;
  if (is_live && num_active > 0) {
    SelectOrdered(best, num_experts, num_active, lane, scratch, ids, weights);
    return;
  }
#pragma unroll 1
  for (int i = lane; i < num_active; i += 32) {
    ids[i] = 0;
    weights[i] = 0.0f;
  }
}

}  // namespace

std::string RouterTopk(const RouterTopkArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return "";
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(args.num_rows));
  shape.block = dim3(32);
  shape.shared_bytes = RouterScratch::Bytes(args.num_experts, args.num_active);
  shape.stream = stream;
  return Launch(RouterTopkKernel, shape, args);
}

}  // namespace strata
