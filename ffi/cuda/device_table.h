// The n-gram table where kernels read it: raw GGUF rows in the device's memory, or in page-locked
// memory of the host that the device reads over its link ("mapped": about 100 bytes a row are asked
// of it, 16 rows a token). Or a table that stays in its file, of which a thread of the host reads
// the rows that a step asks for (table_reader.h).
//
// A table in memory is opened empty and loaded slice by slice, so that the caller can show progress
// and stop; rows are copied, so the file's mapping may go when it is loaded. The memory is
// allocated once and never moves: captured graphs hold its address. It must be closed after the
// last step that reads it, since a replayed graph asks nobody.
//
// Threads: Load, one at a time; the rest any. Python's side, in BindDeviceTable:
//   DeviceTable(*, place: "device" | "mapped", type: int, num_rows: int, num_cols: int, address:
//   int)
//     .slot, .row_bytes, .num_bytes, .load(max_s: float) -> bytes loaded so far, .close()
//   DeviceTable.read_by_host(*, table: int, most_rows: int, timeout_ms: int): `table` is the slot
//   of an NgramTable of this library
//     .slot, .row_bytes, .num_bytes, .wake(), .problem() -> str, .recover() -> bool,
//     .stall(milliseconds, timeout_ms), .close()
//   RuntimeError("ngram_table: ...") where memory or a copy fails
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/gguf_types.h"
#include "cuda/launch.h"
#include "cuda/table_reader.h"

namespace strata {

enum class TablePlace { kDevice, kMapped };

class DeviceTable {
 public:
  // `host` is row 0 in readable memory, for as long as Load is called. Returns what is wrong, or an
  // empty string and the table.
  static std::string Open(TablePlace place, const TypeInfo* type, int64_t num_rows,
                          int64_t num_cols, const uint8_t* host,
                          std::shared_ptr<DeviceTable>* table);
  // A table that the host reads, for steps of up to `most_rows` rows of it.
  static std::string OpenRead(std::shared_ptr<NgramTable> read, int64_t most_rows,
                              int64_t timeout_ms, std::shared_ptr<DeviceTable>* table);
  ~DeviceTable();
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  // Copies for about `max_s` seconds; `loaded` is how many bytes of the table are there. Returns
  // what went wrong, or an empty string.
  std::string Load(double max_s, int64_t* loaded);
  bool loaded() const { return reader_ != nullptr || loaded_bytes_ == num_bytes(); }
  // Null: the table is in memory.
  TableReader* reader() const { return reader_.get(); }

  // Row r starts at rows() + r * row_bytes(), without alignment; whole words of 16 bytes around any
  // row may be read.
  const uint8_t* rows() const { return rows_; }  // null: the host reads them
  const TypeInfo* type() const { return type_; }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_cols() const { return num_cols_; }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t num_bytes() const { return num_rows_ * row_bytes_; }

 private:
  DeviceTable(TablePlace place, const TypeInfo* type, int64_t num_rows, int64_t num_cols,
              const uint8_t* host);
  std::string Allocate();

  const TablePlace place_;
  const TypeInfo* const type_;
  const int64_t num_rows_;
  const int64_t num_cols_;
  const int64_t row_bytes_;
  const uint8_t* const host_;
  uint8_t* memory_ = nullptr;      // of the device or the host
  const uint8_t* rows_ = nullptr;  // the same as the device sees it
  int64_t loaded_bytes_ = 0;
  std::unique_ptr<TableReader> reader_;
};

// The process-wide registry. Slots are reused lowest first; it is never destroyed.
int64_t AddDeviceTable(std::shared_ptr<DeviceTable> table);
void RemoveDeviceTable(int64_t slot);
std::shared_ptr<DeviceTable> FindDeviceTable(int64_t slot);  // null if the slot is free

}  // namespace strata
