// Which instruction set's kernels run: chosen once from what the CPU and the operating system
// offer.

#include <atomic>
#include <cstring>

#include "common/panel.h"

namespace strata {
namespace {

// A set that this build does not hold (another architecture) never runs.
bool Supported(const char* name) {
  if (std::strcmp(name, "scalar") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (std::strcmp(name, "avx2") == 0) return avx2;
  if (std::strcmp(name, "avx512") == 0) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
  return false;
}

const Kernels* Find(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "avx512") == 0) return &Avx512Kernels();
  if (std::strcmp(name, "avx2") == 0) return &Avx2Kernels();
#endif
  return &ScalarKernels();
}

const Kernels* Best() {
  for (const char* name : {"avx512", "avx2"}) {
    if (Supported(name)) return Find(name);
  }
  return Find("scalar");
}

std::atomic<const Kernels*>& Active() {
  static std::atomic<const Kernels*> active{Best()};
  return active;
}

}  // namespace

const Kernels& ActiveKernels() { return *Active().load(std::memory_order_relaxed); }

bool CpuRuns(const char* name) { return Supported(name); }

bool SelectKernels(const char* name) {
  if (std::strcmp(name, "auto") == 0) {
    Active() = Best();
    return true;
  }
  if (!Supported(name)) return false;
  Active() = Find(name);
  return true;
}

}  // namespace strata
