// What the kernels of hyper_read share: the norms, the products of BF16 weights that a warp holds
// in registers, the totals of `down`, and the mix.
//
// At decode the kernels wait more than they read, so each asks for everything at its start: what
// the longest chain of steps needs first, then the weights, then the rest.
#pragma once

#include "cuda/numerics.cuh"
#include "cuda/products.cuh"
#include "cuda/reduce.cuh"
#include "cuda/segments_body.cuh"

namespace strata {

// Places within all of these fit 32 bits: HyperRead sees to it. A kernel that only waits for memory
// has no time for longer numbers.
struct HyperParams {
  const float* streams;
  float* new_streams;
  const float* y;
  const float* beta;
  const float* norm;
  const int32_t* live;
  float* x;
  float* next_beta;
  float* scales;  // [T, J] 1 / rms of each stream
  float* sums;    // as SumsOf says; of down and inject
  int32_t num_rows, num_streams, width, rank, down_segments, down_panels;
  float eps;
  float inverse_width;    // 1 / D
  float inverse_streams;  // 1 / J
  bool injected;
  int32_t down_rows, up_rows;  // of a block of the first and of the second kernel
  int32_t up_grid_at;          // of up's code book in the second kernel's shared memory
  PanelMatrix down, inject, up;
};

// The number of live rows. The address is the same for all threads, but the compiler must not know
// it: it would move a number that all threads share to a uniform register as soon as it is there,
// and wait for it before it issues loads that do not need it.
__device__ __forceinline__ int LiveNow(const HyperParams& p) {
  return p.live[threadIdx.x < blockDim.x ? 0 : 1];
}

__device__ __forceinline__ const uint8_t* UnitAt(const PanelMatrix& m, int panel, int segment) {
  return m.bytes + panel * static_cast<int>(m.panel_bytes) + segment * m.unit_bytes;
}

struct QuotientAndRest {
  int quotient;
  int rest;
};

// For quotients of a few units: sooner there than a division.
__device__ __forceinline__ QuotientAndRest Divided(int value, int by) {
  int quotient = 0;
  for (; value >= by; value -= by) ++quotient;
  return {quotient, value};
}

__device__ __forceinline__ float4 FloatsAt(const float* at) {
  return *reinterpret_cast<const float4*>(at);
}

// beta * y + x
__device__ __forceinline__ float4 Written(float beta, const float4& y, const float4& x) {
  return make_float4(fmaf(beta, y.x, x.x), fmaf(beta, y.y, x.y), fmaf(beta, y.z, x.z),
                     fmaf(beta, y.w, x.w));
}

// a / b for b in [1, 2^126], correctly rounded for |a| in [2^-100, 2^100]. The operator calls a
// function for the numbers that this leaves out, and what a warp holds would be saved for the call.
__device__ __forceinline__ float Quotient(float a, float b) {
#if defined(STRATA_EMULATE)
  return __fdiv_rn(a, b);
#else
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
  const float quotient = __fmul_rn(a, inverse);
  // Outside, infinities among them, the last step would spoil what is right already.
  if (!(fabsf(a) >= 0x1p-100f && fabsf(a) <= 0x1p100f)) return quotient;
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
#endif
}

// e^-x, of x as near to it as +-87 allow; NaN stays NaN.
__device__ __forceinline__ float ExpOfMinus(float x) {
  x = x < -87.0f ? -87.0f : x;
  return ExpBounded(-(x > 87.0f ? 87.0f : x));
}

// SiluMul(x, 1) and the sigmoid without calls.
__device__ __forceinline__ float HeldSilu(float x) {
  return Quotient(x, __fadd_rn(1.0f, ExpOfMinus(x)));
}

__device__ __forceinline__ float HeldSigmoid(float x) {
  return Quotient(1.0f, __fadd_rn(1.0f, ExpOfMinus(x)));
}

// Four warps norm a row, whatever the kernel, so that all blocks get the same bits.
inline constexpr int kNormThreads = 128;
inline constexpr int kQuads = 5;  // of a thread at a time: streams of 2560 values in one go

struct Quads {
  float4 x[kQuads];
  float4 y[kQuads];
};

__device__ __forceinline__ void LoadQuads(const float* x, const float* y, int first, int end,
                                          Quads* quads) {
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int at = first + k * kNormThreads;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    quads->x[k] = at < end ? FloatsAt(x + 4 * at) : zero;
    quads->y[k] = at < end ? FloatsAt(y + 4 * at) : zero;
  }
}

__device__ __forceinline__ void AddSquares(const Quads& quads, float beta, float4* sums) {
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const float4 v = Written(beta, quads.y[k], quads.x[k]);
    sums->x = fmaf(v.x, v.x, sums->x);
    sums->y = fmaf(v.y, v.y, sums->y);
    sums->z = fmaf(v.z, v.z, sums->z);
    sums->w = fmaf(v.w, v.w, sums->w);
  }
}

// Norms the block's segment of the streams of its live rows into `normed` [kMostRows, 256], by the
// whole block of kWarps warps; returns how many rows there are, after a barrier. `scratch`: 2 *
// kWarps floats. `ahead()` asks for what the kernel before does not write; it may load, not wait.
template <int kWarps, typename Ahead>
__device__ __forceinline__ int NormRows(const HyperParams& p, float* normed, float* scratch,
                                        const Ahead& ahead) {
  constexpr int kGroups = kWarps * 32 / kNormThreads;  // rows at a time
  const int group = threadIdx.x / kNormThreads;
  const int thread = threadIdx.x % kNormThreads;
  const int quads_of_stream = p.width / 4;
  const int first_row = blockIdx.z * p.down_rows;
  const int begin = blockIdx.x * 256;
  const int count = min(256, p.num_streams * p.width - begin);
  const auto first = Divided(begin, p.width);
  const int first_stream = first.quotient;
  const int last_stream = first_stream + Divided(first.rest + count - 1, p.width).quotient;
  // The four values that the thread norms; whole blocks of 32 lie in one stream.
  const bool norms = 4 * thread < count;
  const auto own = Divided(first.rest + (norms ? 4 * thread : 0), p.width);
  const int own_stream = first_stream + own.quotient;
  Quads quads;
  float4 x = {}, y = {}, gamma = {};  // of the four values
  float beta = 0.0f, own_beta = 0.0f;
  const auto load_stream = [&](int r, int s) {
    const int row = first_row + r;
    beta = p.beta[row * p.num_streams + s];
    LoadQuads(p.streams + (row * p.num_streams + s) * p.width, p.y + row * p.width, thread,
              quads_of_stream, &quads);
  };
  const auto load_own = [&](int r) {
    const int row = first_row + r;
    const int stream = row * p.num_streams + own_stream;
    x = FloatsAt(p.streams + stream * p.width + own.rest);
    y = FloatsAt(p.y + row * p.width + own.rest);
    gamma = FloatsAt(p.norm + own_stream * p.width + own.rest);
    own_beta = p.beta[stream];
  };
  const int num_rows = min(p.down_rows, LiveNow(p) - first_row);
  ahead();
  WaitForKernelBefore();
  LetNextKernelBegin();
  // The first row may be read without knowing that it is live: it is not used then.
  if (group == 0) {
    load_stream(0, first_stream);
    load_own(0);
  }
  int turn = 0;
  for (int r = group; r - group < num_rows; r += kGroups) {
    const bool live = r < num_rows;
    if (live && r > 0) load_own(r);
    for (int s = first_stream; s <= last_stream; ++s, turn ^= 1) {
      // Two halves by turns: the one is read while the other is written.
      float* of_warps = scratch + turn * kWarps;
      if (live) {
        if (r > 0 || s > first_stream) load_stream(r, s);
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        AddSquares(quads, beta, &sums);
        for (int at = thread + kQuads * kNormThreads; at < quads_of_stream;
             at += kQuads * kNormThreads) {
          const int row = first_row + r;
          LoadQuads(p.streams + (row * p.num_streams + s) * p.width, p.y + row * p.width, at,
                    quads_of_stream, &quads);
          AddSquares(quads, beta, &sums);
        }
        const float sum = WarpSum((sums.x + sums.y) + (sums.z + sums.w));
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
      }
      __syncthreads();
      if (!live) continue;
      const float* w = of_warps + group * (kNormThreads / 32);
      const float total = (w[0] + w[1]) + (w[2] + w[3]);
      const float scale = rsqrtf(fmaf(total, p.inverse_width, p.eps));
      if (thread == 0 && blockIdx.y == 0 && s * p.width >= begin) {
        p.scales[(first_row + r) * p.num_streams + s] = scale;
      }
      if (norms && own_stream == s) {
        const float4 value = Written(own_beta, y, x);
        *reinterpret_cast<float4*>(normed + r * 256 + 4 * thread) =
            make_float4(value.x * scale * gamma.x, value.y * scale * gamma.y,
                        value.z * scale * gamma.z, value.w * scale * gamma.w);
      }
    }
  }
  __syncthreads();
  return num_rows;
}

// A lane's BF16 weights of one block of 32.
using Held = RawWords<16>;

__device__ __forceinline__ void Hold(const uint8_t* unit, int block, int lane, Held* held) {
  LoadWords(unit + block * 2048, lane, held);
}

// keep(k, r, p) with the sums of products p of contract T of the blocks held, for rows `first` and
// those after it. All blocks meet the same activations: reading those, more than the sums, takes
// the time. They begin at x; rows lie `width` apart.
template <int kRows, int kBlocks, typename Keep>
__device__ __forceinline__ void MultiplyRows(const Held (&held)[kBlocks], const float* x, int width,
                                             int first, int num_rows, const Keep& keep) {
  float products[kBlocks][kRows] = {};
  int row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = kRows == 1 ? first : min(first + r, num_rows - 1);
  // The blocks' chains side by side: each waits for its own sum only.
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 v = FloatsAt(InShared(x) + row[r] * width + 4 * i);
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        const float4 w = FourFloats<GgmlType::kBF16>(held[k].words + 2 * i);
        float& product = products[k][r];
        product = __fmaf_rn(w.x, v.x, product);
        product = __fmaf_rn(w.y, v.y, product);
        product = __fmaf_rn(w.z, v.z, product);
        product = __fmaf_rn(w.w, v.w, product);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) keep(k, row[r], products[k][r]);
  }
}

template <int kBlocks, typename Keep>
__device__ __forceinline__ void MultiplyHeld(Held (&held)[kBlocks], const float* x, int width,
                                             int num_rows, const Keep& keep) {
  if (num_rows == 1) return MultiplyRows<1>(held, x, width, 0, 1, keep);
#pragma unroll 1
  for (int r = 0; r < num_rows; r += 2) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) Forget(&held[k]);
    MultiplyRows<2>(held, x, width, r, num_rows, keep);
  }
}

// Every block of the first kernel asks for its part of `up`, which the second one then finds in the
// L2 cache.
__device__ __forceinline__ void PrefetchUp(const HyperParams& p) {
#if !defined(STRATA_EMULATE)
  if (blockIdx.z > 0) return;
  const unsigned bytes = static_cast<unsigned>(p.up.panel_bytes) * ((p.up.rows + 31) / 32);
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  const unsigned stride = gridDim.x * gridDim.y * blockDim.x * 128;
  for (unsigned at = (block * blockDim.x + threadIdx.x) * 128; at < bytes; at += stride) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.up.bytes + at));
  }
#else
  (void)p;
#endif
}

// Where the sums of 32 columns of `down` (the last 32: of `inject`) lie for a row: [segments, 32],
// so that a thread finds its own at constant distances.
__device__ __forceinline__ float* SumsOf(const HyperParams& p, int row, int panel) {
  return p.sums + (row * (p.down_panels + 1) + panel) * p.down_segments * 32;
}

inline constexpr int kSumsAhead = 40;

// Sums past the last are +0: added to a total that began as +0, they change no bit of it.
__device__ __forceinline__ void LoadSums(const float* at, int count, float (&sums)[kSumsAhead]) {
  if (count >= kSumsAhead) {
#pragma unroll
    for (int s = 0; s < kSumsAhead; ++s) sums[s] = at[s * 32];
  } else {
#pragma unroll
    for (int s = 0; s < kSumsAhead; ++s) sums[s] = s < count ? at[s * 32] : 0.0f;
  }
}

// The first layer's activations of the block's live rows into `mixed` [rows, R], and, by the blocks
// of tile 0, the next betas; by the whole block, without a barrier at the end. Returns the number
// of rows. A total is contract T's: the segments' sums in ascending order, from +0. `ahead()` asks
// for what it likes and waits for the first kernel.
template <typename Ahead>
__device__ __forceinline__ int MixedRows(const HyperParams& p, float* mixed, const Ahead& ahead) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int first_row = blockIdx.y * p.up_rows;
  const int panels = p.down_panels + (blockIdx.x == 0 ? 1 : 0);
  auto job = Divided(threadIdx.x / 32, panels);  // a row and a panel
  float sums[kSumsAhead] = {};
  const auto load = [&](int first) {
    LoadSums(SumsOf(p, first_row + job.quotient, job.rest) + first * 32 + lane,
             p.down_segments - first, sums);
  };
  // What does not need the first kernel comes before the wait for it.
  const int num_rows = min(p.up_rows, LiveNow(p) - first_row);
  ahead();
  // The first row's sums may be read without knowing that it is live: they are not used then.
  bool loaded = job.quotient == 0;
  if (loaded) load(0);
  while (job.quotient < num_rows) {
    float total = 0.0f;
    for (int first = 0; first < p.down_segments; first += kSumsAhead, loaded = false) {
      if (!loaded) load(first);
#pragma unroll
      for (int s = 0; s < kSumsAhead; ++s) total = __fadd_rn(total, sums[s]);
    }
    const float mean = total * p.inverse_streams;
    if (job.rest < p.down_panels) {
      mixed[job.quotient * p.rank + job.rest * 32 + lane] = HeldSilu(mean);
    } else if (lane < p.num_streams) {
      p.next_beta[(first_row + job.quotient) * p.num_streams + lane] =
          p.injected ? 2.0f * HeldSigmoid(mean) : 0.0f;
    }
    for (job.rest += warps; job.rest >= panels; job.rest -= panels) ++job.quotient;
  }
  return num_rows;
}

// Dead rows: their streams stay, the rest is zero.
__device__ __forceinline__ void ClearDeadRows(const HyperParams& p) {
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int first_row = blockIdx.y * p.up_rows;
  const int last_row = min(first_row + p.up_rows, p.num_rows);
  const int d = blockIdx.x * 32 + lane;
  // The last warps first: they have the least to do in the mix.
  for (int row = max(first_row, *p.live) + warps - 1 - static_cast<int>(threadIdx.x) / 32;
       row < last_row; row += warps) {
    p.x[row * p.width + d] = 0.0f;
    for (int s = 0; s < p.num_streams; ++s) {
      const int at = (row * p.num_streams + s) * p.width + d;
      if (p.new_streams != p.streams) p.new_streams[at] = p.streams[at];
      if (blockIdx.x == 0 && lane == 0) p.next_beta[row * p.num_streams + s] = 0.0f;
    }
  }
}

// What the mix needs of one value of a stream besides its gate.
struct MixInput {
  float x, y, beta, scale, norm;
};

__device__ __forceinline__ MixInput LoadMixInput(const HyperParams& p, int r, int s) {
  const int row = min(static_cast<int>(blockIdx.y) * p.up_rows + r, p.num_rows - 1);
  const int d = blockIdx.x * 32 + threadIdx.x % 32;
  const int stream = row * p.num_streams + s;
  return {p.streams[stream * p.width + d], p.y[row * p.width + d], p.beta[stream], p.scales[stream],
          p.norm[s * p.width + d]};
}

// Writes the block's columns of the new streams and of x. A warp takes a row and a stream; `input`
// is that of its first. gate(r, s) is the lane's product with `up`; `terms`: [rows, J, 32] floats
// of shared memory.
template <typename Gate>
__device__ __forceinline__ void Mix(const HyperParams& p, int num_rows, MixInput input,
                                    float* terms, const Gate& gate) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int first_row = blockIdx.y * p.up_rows;
  const int d = blockIdx.x * 32 + lane;
  for (int job = warp; job < num_rows * p.num_streams; job += warps) {
    const auto place = Divided(job, p.num_streams);
    const int r = place.quotient;
    const int s = place.rest;
    if (job != warp) input = LoadMixInput(p, r, s);
    const float value = fmaf(input.beta, input.y, input.x);
    const float normed = value * input.scale * input.norm;
    terms[job * 32 + lane] = HeldSigmoid(gate(r, s)) * normed;
    p.new_streams[((first_row + r) * p.num_streams + s) * p.width + d] = value;
  }
  __syncthreads();
  for (int r = warp; r < num_rows; r += warps) {
    float sum = 0.0f;
    for (int s = 0; s < p.num_streams; ++s) sum += terms[(r * p.num_streams + s) * 32 + lane];
    p.x[(first_row + r) * p.width + d] = sum * p.inverse_streams;
  }
}

}  // namespace strata
