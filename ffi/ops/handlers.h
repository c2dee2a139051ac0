// Every XLA handler of the library; module.cc registers them by name.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace strata {

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantMatmulFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ExpertFfnFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RouterTopkFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(EmbedRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(HyperReadFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NgramGateFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NgramRowsFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GdnWindowFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaAppendFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaSelectFfi);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QsaAttendFfi);

}  // namespace strata
