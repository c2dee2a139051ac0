// Rows of the embedding table as float32.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_store.h"
#include "cuda/launch.h"

namespace strata {

struct EmbedRowsArgs {
  const int32_t* ids;  // [T]
  const int32_t* live;
  float* out;  // [T, D]
  int64_t num_rows;
  const DeviceMatrix* table;
};

std::string EmbedRows(const EmbedRowsArgs& args, cudaStream_t stream);

}  // namespace strata
