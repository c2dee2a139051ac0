// The CUDA library's XLA handlers, and what they share.
//
// A handler runs when its step is captured into a graph and not when the graph is replayed: it
// looks matrices up, launches a fixed set of kernels and reads nothing from the device.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/launch.h"
#include "xla/ffi/api/ffi.h"

namespace strata {

// How often a handler ran: a test asserts that replayed steps run none.
inline std::atomic<int64_t> handler_calls{0};

#if defined(STRATA_EMULATE)
// The CPU platform has no stream; any context without demands stands in for it.
using StreamContext = xla::ffi::DeviceOrdinal;
using StreamArgument = int32_t;
inline cudaStream_t StreamOf(StreamArgument) {
  ++handler_calls;
  return nullptr;
}
#else
using StreamContext = xla::ffi::PlatformStream<cudaStream_t>;
using StreamArgument = cudaStream_t;
inline cudaStream_t StreamOf(StreamArgument stream) {
  ++handler_calls;
  return stream;
}
#endif

XLA_FFI_DECLARE_HANDLER_SYMBOL(EmbedRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ExpertFfnFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GdnChunkFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GdnWindowFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HyperReadFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MarkFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NgramAskFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NgramGateFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NgramRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaAppendFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaAttendFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaSelectFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantMatmulFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouteFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouterTopkFfi);

}  // namespace strata
