// The parts of gdn_window's kernel: what each thread of a value head's block holds from row to row.
//
//   StatePart  every thread: C/16 key rows by 4 columns of the state, in registers
//   Column     threads 0 to C-1: a value column, its sum over the key rows and its gated norm
//   Channel    threads C to 4 C-1: a q, k or v channel of the convolution
//   Gates      one thread: the decay and beta of a row
//
// Inputs are asked for a row before they are needed. Rows v are counted as in `Span`, rows t from
// the window's first.
#pragma once

#include "cuda/ops/gdn_window.h"
#include "cuda/reduce.cuh"

namespace strata::gdn {

inline constexpr float kUnitEps = 1e-6f;  // of the q and k normalisation, fixed by the model
inline constexpr int kGroups = 16;        // of key rows: C/16 rows a group, 4 C threads

// What a row's recurrence needs besides its vectors.
struct RowScalars {
  float q_scale;  // 1 / (|q| sqrt(C))
  float k_scale;  // 1 / |k|
  float q_dot_k;  // of the scaled vectors
  float decay;
  float beta;
};

template <int kDim>
struct alignas(16) HeadShared {
  float mixed[2][3 * kDim];       // q|k|v of a row after convolution and SiLU; q, k not yet scaled
  float recalled[kGroups][kDim];  // k^T S over a group's rows
  float queried[kGroups][kDim];   // q^T S likewise
  float delta[kDim];              // k_scale u
  float out[kDim];                // o
  RowScalars scalars;
  bool writes_shared;  // whether this block writes the q and k channels' new state
};

// A block's place in the grid is (key head, value head of it).
__device__ __forceinline__ int HeadOfBlock() { return blockIdx.y * gridDim.x + blockIdx.x; }

// kCount floats that lie together, 16 bytes at a time where that is whole.
template <int kCount>
__device__ __forceinline__ void LoadRun(const float* from, float (&to)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
  }
}

// Values in a row of proj. All offsets are below 2^31: GdnWindow checks it, and 64 bits would cost
// the registers that the state needs.
__device__ __forceinline__ int Stride(const GdnWindowArgs& a, int dim) {
  return static_cast<int>((2 * a.key_heads + 2 * a.value_heads) * dim + 2 * a.value_heads);
}

// A call's rows, counted from the first one that is replayed.
struct Span {
  int kept;       // drafts of the call before, which came true
  int committed;  // those and the certain rows: the states stand for them
  int total;      // and this call's drafts
};

// Nothing on the device can refuse numbers that do not fit: they are brought into range.
__device__ __forceinline__ Span SpanOf(const GdnWindowArgs& a, int kept, int certain, int live) {
  const int rows = LiveRows(live, a.num_rows);
  const int replayed = LiveRows(kept, a.num_pending);
  const int first_draft = max(LiveRows(certain, rows), rows - static_cast<int>(a.num_pending));
  return {replayed, replayed + first_draft, replayed + rows};
}

// What row v puts into the recurrence: its q|k|v, and its alphas with the betas after them.
template <int kDim>
struct RowSource {
  const float* qkv;
  const float* gates;

  __device__ static RowSource Of(const GdnWindowArgs& a, int kept, int v) {
    const int gates = 2 * static_cast<int>(a.value_heads);
    if (v < kept) {
      const int channels = static_cast<int>(2 * a.key_heads + a.value_heads) * kDim;
      const float* row = a.pending + v * (channels + gates);
      return {row, row + channels};
    }
    const int stride = Stride(a, kDim);
    const float* row = a.proj + (v - kept) * stride;
    return {row, row + stride - gates};
  }
};

// A thread's channel of the convolution: its taps and the inputs under them, the row's own last.
// Taps that there are not are zero, over inputs that are zero.
template <int kDim>
class Channel {
 public:
  __device__ void Ask(const GdnWindowArgs& a, int place) {
    const int key_heads = static_cast<int>(a.key_heads);
    const int part = place / kDim;
    const int first = part == 0   ? static_cast<int>(blockIdx.x)
                      : part == 1 ? key_heads + static_cast<int>(blockIdx.x)
                                  : 2 * key_heads + HeadOfBlock();
    channel_ = first * kDim + place % kDim;
    AskRow(a, 0, 0);
    if (a.num_pending > 0) replayed_ = a.pending[channel_];
    const int channels = Channels(a);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int tap = static_cast<int>(a.num_taps) - kTaps + j;  // tap K-1 is the last
      weights_[j] = tap >= 0 ? a.conv_weight[tap * channels + channel_] : 0.0f;
      if (j + 1 < kTaps) inputs_[j] = tap >= 0 ? a.conv_state[tap * channels + channel_] : 0.0f;
    }
  }

  // Now that it is known whether row 0 is a replayed one.
  __device__ void Begin(const Span& span) {
    if (span.kept > 0) next_ = replayed_;
    if (span.committed == 0) Keep();
  }

  __device__ float Convolve(const GdnWindowArgs& a, int v, const Span& span) {
    inputs_[kTaps - 1] = next_;
    if (v + 1 < span.total) AskRow(a, span.kept, v + 1);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) sum = __fmaf_rn(weights_[j], inputs_[j], sum);
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) inputs_[j] = inputs_[j + 1];
    if (v + 1 == span.committed) Keep();
    return sum * Sigmoid(sum);
  }

  // The certain rows' last inputs, and those of the drafts.
  __device__ void WriteState(const GdnWindowArgs& a, const Span& span) const {
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) {
      const int row = static_cast<int>(a.num_taps) - kTaps + j;
      if (row >= 0) a.new_conv_state[row * Channels(a) + channel_] = kept_[j];
    }
    const int width = Channels(a) + 2 * static_cast<int>(a.value_heads);
#pragma unroll 1
    for (int v = span.committed; v < span.total; ++v) {
      a.new_pending[(v - span.committed) * width + channel_] =
          RowSource<kDim>::Of(a, span.kept, v).qkv[channel_];
    }
  }

 private:
  static constexpr int kTaps = static_cast<int>(kMostGdnTaps);

  __device__ static int Channels(const GdnWindowArgs& a) {
    return static_cast<int>(2 * a.key_heads + a.value_heads) * kDim;
  }

  __device__ void AskRow(const GdnWindowArgs& a, int kept, int v) {
    next_ = RowSource<kDim>::Of(a, kept, v).qkv[channel_];
  }

  __device__ void Keep() {
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) kept_[j] = inputs_[j];
  }

  // Threads without a channel never ask for one; the compiler wants to see values all the same.
  int channel_ = 0;
  float next_ = 0.0f;
  float replayed_ = 0.0f;  // row 0, if it is a draft of the call before
  float weights_[kTaps] = {};
  float inputs_[kTaps] = {};
  float kept_[kTaps - 1] = {};  // the inputs that the next call begins with
};

// Scales of q and k, and their product, by one warp.
template <int kDim>
__device__ __forceinline__ void ScaleVectors(const float* mixed, int lane, RowScalars* to) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int i = lane; i < kDim; i += 32) {
    const float q = mixed[i];
    const float k = mixed[kDim + i];
    qq = __fmaf_rn(q, q, qq);
    kk = __fmaf_rn(k, k, kk);
    qk = __fmaf_rn(q, k, qk);
  }
  qq = WarpSum(qq);
  kk = WarpSum(kk);
  qk = WarpSum(qk);
  if (lane == 0) {
    to->q_scale = 1.0f / sqrtf(qq + kUnitEps) * (1.0f / sqrtf(static_cast<float>(kDim)));
    to->k_scale = 1.0f / sqrtf(kk + kUnitEps);
    to->q_dot_k = qk * to->q_scale * to->k_scale;
  }
}

// A column's sum over the groups, in a fixed tree.
template <int kDim>
__device__ __forceinline__ float SumGroups(const float (&sums)[kGroups][kDim], int column) {
  float v[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) v[i] = sums[i][column];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += v[i + 8];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] += v[i + 4];
  v[0] += v[2];
  v[1] += v[3];
  return v[0] + v[1];
}

// A thread's part of the head's state: kRows key rows of its group, four columns.
template <int kRows>
class StatePart {
  static constexpr int kDim = kGroups * kRows;

 public:
  __device__ void Load(const float* state) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) s_[i] = *reinterpret_cast<const float4*>(state + At(i));
  }

  __device__ void Store(float* state) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) *reinterpret_cast<float4*>(state + At(i)) = s_[i];
  }

  // The group's share of k^T S and q^T S.
  __device__ void Share(const float* mixed, HeadShared<kDim>* shared) {
    float q[kRows], k[kRows];
    LoadRun(mixed + Group() * kRows, q);
    LoadRun(mixed + kDim + Group() * kRows, k);
    float4 recalled = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 queried = recalled;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      AddScaled(k[i], s_[i], &recalled);
      AddScaled(q[i], s_[i], &queried);
    }
    *reinterpret_cast<float4*>(&shared->recalled[Group()][Column()]) = recalled;
    *reinterpret_cast<float4*>(&shared->queried[Group()][Column()]) = queried;
  }

  // S <- decay S + k delta^T
  __device__ void Update(float decay, const float* mixed, const float* delta) {
    float k[kRows];
    LoadRun(mixed + kDim + Group() * kRows, k);
    const float4 added = *reinterpret_cast<const float4*>(delta + Column());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4 s = s_[i];
      s = make_float4(decay * s.x, decay * s.y, decay * s.z, decay * s.w);
      AddScaled(k[i], added, &s);
      s_[i] = s;
    }
  }

 private:
  __device__ static int Group() { return threadIdx.x / (kDim / 4); }
  __device__ static int Column() { return threadIdx.x % (kDim / 4) * 4; }
  __device__ static int At(int i) { return (Group() * kRows + i) * kDim + Column(); }

  __device__ static void AddScaled(float factor, const float4& v, float4* to) {
    to->x = __fmaf_rn(factor, v.x, to->x);
    to->y = __fmaf_rn(factor, v.y, to->y);
    to->z = __fmaf_rn(factor, v.z, to->z);
    to->w = __fmaf_rn(factor, v.w, to->w);
  }

  float4 s_[kRows];
};

// The thread that turns alpha and beta into a row's gates.
template <int kDim>
class Gates {
 public:
  __device__ void Ask(const GdnWindowArgs& a) {
    decay_ = a.decay[HeadOfBlock()];
    dt_bias_ = a.dt_bias[HeadOfBlock()];
    AskRow(a, 0, 0);
  }

  __device__ void Begin(const GdnWindowArgs& a, const Span& span) {
    if (span.kept > 0) AskRow(a, span.kept, 0);
  }

  __device__ void Compute(const GdnWindowArgs& a, int v, const Span& span, RowScalars* to) {
    const float x = alpha_ + dt_bias_;
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    to->decay = expf(decay_ * softplus);
    to->beta = Sigmoid(beta_);
    if (v + 1 < span.total) AskRow(a, span.kept, v + 1);
  }

  // What the drafts' gates are made of; nobody reads the rows of another head.
  __device__ void WriteState(const GdnWindowArgs& a, const Span& span) const {
    const int gates = 2 * static_cast<int>(a.value_heads);
    const int channels = static_cast<int>(2 * a.key_heads + a.value_heads) * kDim;
#pragma unroll 1
    for (int v = span.committed; v < span.total; ++v) {
      const float* from = RowSource<kDim>::Of(a, span.kept, v).gates + HeadOfBlock();
      float* to = a.new_pending + (v - span.committed) * (channels + gates) + channels;
      to[HeadOfBlock()] = from[0];
      to[HeadOfBlock() + gates / 2] = from[gates / 2];
    }
  }

 private:
  __device__ void AskRow(const GdnWindowArgs& a, int kept, int v) {
    const float* from = RowSource<kDim>::Of(a, kept, v).gates + HeadOfBlock();
    alpha_ = from[0];
    beta_ = from[a.value_heads];
  }

  float decay_ = 0.0f;
  float dt_bias_ = 0.0f;
  float alpha_ = 0.0f;
  float beta_ = 0.0f;
};

// The thread of a value column: combines the groups' shares, then norms and gates the result.
template <int kDim>
class Column {
 public:
  __device__ void Ask(const GdnWindowArgs& a) {
    norm_weight_ = a.norm_weight[threadIdx.x];
    AskRow(a, 0);
  }

  __device__ void Combine(const float* mixed, HeadShared<kDim>* shared) {
    const int column = threadIdx.x;
    const RowScalars& r = shared->scalars;
    const float recalled = r.k_scale * SumGroups(shared->recalled, column);
    const float queried = r.q_scale * SumGroups(shared->queried, column);
    const float u = r.beta * (mixed[2 * kDim + column] - r.decay * recalled);
    shared->delta[column] = r.k_scale * u;
    // q^T (decay S + k u^T): the state before the row serves both of its products.
    out_ = r.decay * queried + r.q_dot_k * u;
    shared->out[column] = out_;
  }

  __device__ void Write(const GdnWindowArgs& a, int t, int num_live, float squares) {
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(kDim) + a.eps);
    const int width = static_cast<int>(a.value_heads) * kDim;
    a.y[t * width + HeadOfBlock() * kDim + threadIdx.x] = out_ * scale * norm_weight_ * Sigmoid(z_);
    if (t + 1 < num_live) AskRow(a, t + 1);
  }

 private:
  __device__ void AskRow(const GdnWindowArgs& a, int t) {
    const int z = (t + 1) * Stride(a, kDim) - static_cast<int>(a.value_heads) * (kDim + 2);
    z_ = a.proj[z + HeadOfBlock() * kDim + threadIdx.x];
  }

  float norm_weight_ = 0.0f;
  float z_ = 0.0f;
  float out_ = 0.0f;
};

}  // namespace strata::gdn
