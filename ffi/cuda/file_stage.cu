#include "cuda/bell.cuh"
#include "cuda/file_stage.h"

namespace strata {
namespace {

__global__ void BeginTurnKernel(const TurnArgs p) {
  const StageAt& at = p.at;
  const uint64_t turn = at.state->epoch + 1;
  at.state->epoch = turn;
  at.state->awaited = turn;
  if (at.state->failed != 0 || *p.live > p.most_rows) return;
  StoreReleaseSystem(&at.box->wanted, turn);
  AwaitAnswer(at.box, at.state);
}

__global__ void EndTurnKernel(const StageAt at) {
  __threadfence_system();
  StoreReleaseSystem(&at.box->doorbell, at.state->epoch);
}

Shape OneThread(cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(1);
  shape.block = dim3(1);
  shape.stream = stream;
  return shape;
}

}  // namespace

std::string BeginTurn(const TurnArgs& turn, cudaStream_t stream) {
  return Launch(BeginTurnKernel, OneThread(stream), turn);
}

std::string EndTurn(const StageAt& at, cudaStream_t stream) {
  return Launch(EndTurnKernel, OneThread(stream), at);
}

}  // namespace strata
