#include <algorithm>

#include "cuda/ops/ngram_gate.h"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

constexpr int kSumThreads = 320;  // of a row's stream: two loads of 16 bytes in the real model
constexpr int kChannelThreads = 64;
constexpr int kTaps = static_cast<int>(kMostNgramTaps);
constexpr int64_t kRunRows = 16;  // rows that a thread convolves

// What one row's stream is summed for; K its key, X the stream, v the value.
struct Sums {
  float product;  // K norm_key . X norm_query
  float key;      // K . K
  float stream;   // X . X
  float value;    // v . v
};

__device__ __forceinline__ void AddTo(Sums* sums, float key, float stream, float value,
                                      float norm_key, float norm_query) {
  sums->product = __fmaf_rn(key * norm_key, stream * norm_query, sums->product);
  sums->key = __fmaf_rn(key, key, sums->key);
  sums->stream = __fmaf_rn(stream, stream, sums->stream);
  sums->value = __fmaf_rn(value, value, sums->value);
}

// The thread's share, by 16 bytes.
__device__ __forceinline__ Sums ShareOfStream(const NgramGateArgs& a, int64_t t, int64_t s) {
  const auto at = [](const float* from) { return reinterpret_cast<const float4*>(from); };
  const float4* key = at(a.key_value + (t * (a.num_streams + 1) + s) * a.width);
  const float4* value = at(a.key_value + (t * (a.num_streams + 1) + a.num_streams) * a.width);
  const float4* stream = at(a.streams + (t * a.num_streams + s) * a.width);
  const float4* norm_key = at(a.norm_key + s * a.width);
  const float4* norm_query = at(a.norm_query + s * a.width);
  Sums sums = {};
#pragma unroll 2
  for (int i = threadIdx.x; i < a.width / 4; i += kSumThreads) {
    const float4 k = key[i], x = stream[i], v = value[i], nk = norm_key[i], nq = norm_query[i];
    AddTo(&sums, k.x, x.x, v.x, nk.x, nq.x);
    AddTo(&sums, k.y, x.y, v.y, nk.y, nq.y);
    AddTo(&sums, k.z, x.z, v.z, nk.z, nq.z);
    AddTo(&sums, k.w, x.w, v.w, nk.w, nq.w);
  }
  return sums;
}

// Sums over the block in a fixed tree; the first warp's lanes get them.
__device__ __forceinline__ Sums BlockSums(Sums sums) {
  __shared__ Sums warps[kSumThreads / 32];
  const auto over_warp = [](const Sums& s) {
    return Sums{WarpSum(s.product), WarpSum(s.key), WarpSum(s.stream), WarpSum(s.value)};
  };
  sums = over_warp(sums);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x >= 32) return sums;
  return over_warp(threadIdx.x < kSumThreads / 32 ? warps[threadIdx.x] : Sums{});
}

// Dead rows too: nobody reads their factors, and nothing has to wait for `live`.
__global__ void __launch_bounds__(kSumThreads) NgramFactorsKernel(const NgramGateArgs a) {
  const int64_t t = blockIdx.y;
  const int64_t s = blockIdx.x;
  const Sums sums = BlockSums(ShareOfStream(a, t, s));
  if (threadIdx.x > 0) return;
  const float width = static_cast<float>(a.width);
  const float key_scale = 1.0f / sqrtf(sums.key / width + a.eps);
  const float stream_scale = 1.0f / sqrtf(sums.stream / width + a.eps);
  float z = sums.product * key_scale * stream_scale / sqrtf(width);
  const float root = sqrtf(fmaxf(fabsf(z), 1e-6f));
  z = z > 0.0f ? root : (z < 0.0f ? -root : z);
  const float gate = Sigmoid(z);
  // G is the value times the gate, and so are its squares' sum and the gate's square.
  const float scale = 1.0f / sqrtf(gate * gate * sums.value / width + a.eps);
  a.factors[t * a.num_streams + s] = make_float2(gate, scale);
}

// One channel of the residual streams.
struct GateChannel {
  const NgramGateArgs& a;
  int stream;
  int channel;  // in all streams
  float norm;

  __device__ GateChannel(const NgramGateArgs& args, int c)
      : a(args), stream(c / static_cast<int>(args.width)), channel(c), norm(args.norm_conv[c]) {}

  __device__ float Value(int64_t t) const {
    const int in_stream = channel - stream * static_cast<int>(a.width);
    return a.key_value[(t * (a.num_streams + 1) + a.num_streams) * a.width + in_stream];
  }
  __device__ float2 Factors(int64_t t) const { return a.factors[t * a.num_streams + stream]; }

  // G norm'd: what row t puts into the convolution.
  __device__ float Input(const float2& factors, float value) const {
    return factors.x * value * factors.y * norm;
  }
  __device__ float Input(int64_t t) const { return Input(Factors(t), Value(t)); }
};

// The inputs before the run, for its threads; [history, kChannelThreads], the thread's column.
// Those before row 0 end with the kept drafts.
__device__ __forceinline__ void LoadHistory(const GateChannel& channel, int first_row, int history,
                                            int kept, int64_t wide, float* inputs) {
  if (first_row > 0) {
    for (int i = 0; i < history; ++i) {
      inputs[i * kChannelThreads] = channel.Input(first_row - history + i);
    }
    return;
  }
#pragma unroll 9
  for (int i = 0; i < history; ++i) {
    const int at = i + kept;
    const float* from =
        at < history ? channel.a.conv_state + at * wide : channel.a.pending + (at - history) * wide;
    inputs[i * kChannelThreads] = from[channel.channel];
  }
}

// The last `history` inputs of certain rows, then those of drafts. Only threads of the first run
// write, which have read what was there.
__device__ __forceinline__ void WriteHistory(const GateChannel& channel, int certain, int num_live,
                                             int run_rows, int history, int64_t wide,
                                             const float* inputs) {
#pragma unroll 1
  for (int i = 0; i < history + num_live - certain; ++i) {
    const int at = certain + i;  // counted from the oldest input before row 0
    float* to = i < history ? channel.a.new_conv_state + i * wide
                            : channel.a.new_pending + (i - history) * wide;
    to[channel.channel] =
        at < history + run_rows ? inputs[at * kChannelThreads] : channel.Input(at - history);
  }
}

// Adds to a run of rows of one channel.
__global__ void __launch_bounds__(kChannelThreads) NgramApplyKernel(const NgramGateArgs a) {
  STRATA_SHARED(float, shared);  // [history + rows of a run, kChannelThreads]
  const int64_t wide = a.num_streams * a.width;
  const int c = blockIdx.x * kChannelThreads + threadIdx.x;
  if (c >= wide) return;  // threads share nothing, so none waits for another
  const int asked_live = *a.live, asked_certain = *a.certain;
  const int kept = LiveRows(*a.kept, a.num_pending);
  const GateChannel channel(a, c);
  const int history = static_cast<int>((a.num_taps - 1) * a.dilation);
  const int dilation = static_cast<int>(a.dilation);
  const int run_rows = max(static_cast<int>(kRunRows), history);
  const int first = blockIdx.y * run_rows;
  float* inputs = shared + threadIdx.x;
  // Asked for a row ahead.
  float value = channel.Value(first);
  float2 factors = channel.Factors(first);
  float x = a.streams[first * wide + c];
  float weights[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    weights[j] = j < a.num_taps ? a.conv_weight[j * wide + c] : 0.0f;
  }
  LoadHistory(channel, first, history, kept, wide, inputs);

  const int num_live = LiveRows(asked_live, a.num_rows);
  const int certain =
      max(LiveRows(asked_certain, num_live), num_live - static_cast<int>(a.num_pending));
  const int last = min(first + run_rows, static_cast<int>(a.num_rows));
#pragma unroll 1
  for (int t = first; t < min(last, num_live); ++t) {
    float* row = inputs + (t - first) * kChannelThreads;  // its oldest tap
    row[history * kChannelThreads] = channel.Input(factors, value);
    const float gated = x + factors.x * value;
    if (t + 1 < min(last, num_live)) {
      value = channel.Value(t + 1);
      factors = channel.Factors(t + 1);
      x = a.streams[(t + 1) * wide + c];
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (j < a.num_taps) sum = __fmaf_rn(weights[j], row[j * dilation * kChannelThreads], sum);
    }
    a.new_streams[t * wide + c] = gated + sum * Sigmoid(sum);
  }
  if (a.new_streams != a.streams) {
#pragma unroll 1
    for (int t = max(first, num_live); t < last; ++t) {
      a.new_streams[t * wide + c] = a.streams[t * wide + c];
    }
  }
  if (first == 0) {
    WriteHistory(channel, certain, num_live, min(num_live, run_rows), history, wide, inputs);
  }
}

}  // namespace

std::string NgramGate(const NgramGateArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return "";
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(args.num_streams), static_cast<unsigned>(args.num_rows));
  shape.block = dim3(kSumThreads);
  shape.stream = stream;
  std::string error = Launch(NgramFactorsKernel, shape, args);
  if (!error.empty()) return error;
  const int64_t history = (args.num_taps - 1) * args.dilation;
  const int64_t run_rows = std::max(kRunRows, history);
  const int64_t wide = args.num_streams * args.width;
  shape.grid = dim3(static_cast<unsigned>((wide + kChannelThreads - 1) / kChannelThreads),
                    static_cast<unsigned>((args.num_rows + run_rows - 1) / run_rows));
  shape.block = dim3(kChannelThreads);
  shape.shared_bytes =
      static_cast<size_t>(history + std::min(run_rows, args.num_rows)) * kChannelThreads * 4;
  return Launch(NgramApplyKernel, shape, args);
}

}  // namespace strata
