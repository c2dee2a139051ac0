// What the cores can multiply at most, for bench_ops.py to compare ops with: chains of dot products
// that never leave the registers. bench_ops.py compiles this for the machine it runs on.

#include <chrono>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kChains = 12;  // enough in flight to hide the latency of one

// Multiply-adds per second of `step`, which does one on each lane of each chain.
template <typename Vector, typename Step>
double Rate(double seconds, double lanes, Vector start, Step step) {
  Vector acc[kChains];
  for (Vector& a : acc) a = start;
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::duration<double> elapsed{};
  double count = 0;
  while (elapsed.count() < seconds) {
    for (int i = 0; i < 4096; ++i) {
      for (Vector& a : acc) {
        a = step(a);
        asm volatile("" : "+x"(a));  // keeps the chain
      }
    }
    count += 4096.0 * kChains * lanes;
    elapsed = std::chrono::steady_clock::now() - begin;
  }
  return count / elapsed.count();
}

}  // namespace

// u8 times s8 into int32, as the products of quantised weights; 0 where this file knows no way.
extern "C" double Int8MacsPerSecond(double seconds) {
#if defined(__AVX512VNNI__)
  const __m512i w = _mm512_set1_epi8(3), q = _mm512_set1_epi8(-5);
  return Rate(seconds, 64, w, [&](__m512i a) { return _mm512_dpbusd_epi32(a, w, q); });
#elif defined(__AVX2__)
  const __m256i w = _mm256_set1_epi8(3), q = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
  return Rate(seconds, 32, w, [&](__m256i a) {
    __m256i code = w;
    asm volatile("" : "+x"(code));  // or the product would be taken out of the loop
    const __m256i pairs = _mm256_maddubs_epi16(code, q);
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, ones));
  });
#else
  return 0.0 * seconds;
#endif
}

// float32 fused multiply-adds, as the products of weights that are not quantised.
extern "C" double FloatMacsPerSecond(double seconds) {
#if defined(__AVX512F__)
  const __m512 w = _mm512_set1_ps(0.5f), x = _mm512_set1_ps(0.25f);
  return Rate(seconds, 16, w, [&](__m512 a) { return _mm512_fmadd_ps(w, x, a); });
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256 w = _mm256_set1_ps(0.5f), x = _mm256_set1_ps(0.25f);
  return Rate(seconds, 8, w, [&](__m256 a) { return _mm256_fmadd_ps(w, x, a); });
#else
  return 0.0 * seconds;
#endif
}
