#include "weights/ngram_table.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "common/slots.h"

namespace strata {
namespace {

constexpr int kThreads = 16;  // where io_uring is not to be had
constexpr int kMaxDepth = 4096;
constexpr int64_t kPage = 4096;  // what disks read; file systems that ask for more say so
constexpr int64_t kMaxRowBytes = int64_t{1} << 20;
constexpr int64_t kMaxAhead = int64_t{1} << 16;  // rows waiting to be read ahead

int OpenUnbuffered(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
  return fd >= 0 ? fd : -errno;
}

// What offsets and lengths must be multiples of; 0 where the file has no unbuffered reads.
int64_t Alignment(int fd) {
#if defined(STATX_DIOALIGN)
  struct statx status = {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    const int64_t align = std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
    return status.stx_dio_offset_align == 0 ? 0 : std::max(kPage, align);
  }
#else
  static_cast<void>(fd);
#endif
  return kPage;
}

// mincore tells the truth only to those who could write to the file; to others every page is
// resident.
bool MaySeeResidency(const std::string& path) {
  struct stat status = {};
  if (stat(path.c_str(), &status) != 0) return false;
  return status.st_uid == geteuid() || faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
}

std::string CheckOptions(const NgramTableOptions& options) {
  if (options.type == nullptr || options.num_rows < 1 || options.num_cols < 1 ||
      options.num_cols % options.type->block_values != 0) {
    return "a table of " + std::to_string(options.num_rows) + " rows of " +
           std::to_string(options.num_cols) + " values, whole blocks of a known type expected";
  }
  const int64_t row_bytes = options.num_cols / options.type->block_values *
                            static_cast<int64_t>(options.type->block_bytes);
  if (row_bytes > kMaxRowBytes || options.num_rows > INT64_MAX / 2 / row_bytes) {
    return std::to_string(options.num_rows) + " rows of " + std::to_string(row_bytes) +
           " bytes, at most " + std::to_string(kMaxRowBytes) + " bytes a row expected";
  }
  if (options.mapped == nullptr || options.offset < 0) return "no place of the table given";
  if (options.depth < 1 || options.depth > kMaxDepth || options.cache_bytes < 0 ||
      options.timeout.count() < 1) {
    return "depth " + std::to_string(options.depth) + ", cache of " +
           std::to_string(options.cache_bytes) + " bytes, time-out of " +
           std::to_string(options.timeout.count()) + " ms; a depth of 1 to " +
           std::to_string(kMaxDepth) + ", a cache of 0 or more and a time-out expected";
  }
  return "";
}

}  // namespace

NgramTable::NgramTable(const NgramTableOptions& options)
    : mode_(options.mode),
      type_(options.type),
      num_rows_(options.num_rows),
      num_cols_(options.num_cols),
      row_bytes_(options.num_cols / options.type->block_values * options.type->block_bytes),
      sees_residency_(MaySeeResidency(options.path)),
      how_("mapped"),
      mapped_(options.mapped, options.num_rows, row_bytes_) {}

std::string NgramTable::Open(const NgramTableOptions& options, std::shared_ptr<NgramTable>* table) {
  std::string wrong = CheckOptions(options);
  if (!wrong.empty()) return wrong;
  std::shared_ptr<NgramTable> made(new NgramTable(options));
  if (made->mode_ == TableMode::kDirect) wrong = made->OpenDirect(options);
  if (!wrong.empty()) return wrong;
  NgramTable* self = made.get();
  if (made->mode_ == TableMode::kDirect) {
    // Half the cache at most, so that what is read ahead does not push itself out.
    const int64_t limit = std::min(kMaxAhead, made->direct_->cache_places() / 2);
    made->queue_.emplace([self](std::span<const int64_t> rows) { self->direct_->Fetch(rows); },
                         4 * options.depth, limit);
  } else {
    const auto ask = [self](std::span<const int64_t> rows) {
      self->mapped_.WillNeed(rows);
      self->counters_.ahead_rows.fetch_add(static_cast<int64_t>(rows.size()));
    };
    made->queue_.emplace(ask, options.depth, kMaxAhead);
  }
  *table = std::move(made);
  return "";
}

NgramTable::~NgramTable() {
  if (direct_.has_value()) direct_->CancelFetch();
}

void NgramTable::FallBack(const std::string& path, const std::string& why) {
  direct_.reset();
  mode_ = TableMode::kMmap;
  how_ = "mapped";
  note_ = path + ": this file system has no unbuffered reads (" + why +
          "), so the n-gram table is mapped, as with --ple_io=mmap";
}

std::string NgramTable::OpenDirect(const NgramTableOptions& options) {
  const std::string& path = options.path;
  const int fd =
      options.open_direct ? options.open_direct(path.c_str()) : OpenUnbuffered(path.c_str());
  if (fd == -EINVAL || fd == -EOPNOTSUPP) {
    FallBack(path, std::strerror(-fd));
    return "";
  }
  if (fd < 0) return path + ": cannot be opened: " + std::strerror(-fd);
  auto file = std::make_shared<const OpenedFile>(fd);
  struct stat status = {};
  if (fstat(fd, &status) != 0 || status.st_size < options.offset + mapped_.num_bytes()) {
    return path + ": " + std::to_string(status.st_size) + " bytes, " +
           std::to_string(options.offset + mapped_.num_bytes()) +
           " expected; it was replaced while it was open, start anew";
  }
  const int64_t page = Alignment(fd);
  if (page == 0) {
    FallBack(path, "none for this file");
    return "";
  }
  const std::string& name = options.name.empty() ? path : options.name;
  direct_.emplace(DirectRowsOptions{name, options.offset, num_rows_, row_bytes_, page,
                                    options.depth, options.cache_bytes, options.timeout,
                                    ChooseEngine(options, std::move(file), page)},
                  &counters_);
  return CompareWithMapping(options);
}

DirectReader::EngineFactory NgramTable::ChooseEngine(const NgramTableOptions& options,
                                                     std::shared_ptr<const OpenedFile> file,
                                                     int64_t page) {
  const int64_t slot_bytes = DirectRows::SlotBytes(row_bytes_, page);
  const int depth = options.depth;
  how_ = std::to_string(depth) + " unbuffered reads in flight";
  if (options.make_engine) return options.make_engine;
  int error = 0;
  if (options.use_uring && MakeUringEngine(file, depth, slot_bytes, &error) != nullptr) {
    how_ += " through io_uring";
    return [=] {
      int ignored = 0;
      return MakeUringEngine(file, depth, slot_bytes, &ignored);
    };
  }
  how_ = "unbuffered reads on " + std::to_string(kThreads) + " threads";
  if (options.use_uring) {
    note_ = std::string("io_uring is not to be had (") + std::strerror(error) +
            "), so rows of the n-gram table are read on " + std::to_string(kThreads) + " threads";
  }
  return [=] { return MakePreadEngine(file, depth, slot_bytes, kThreads); };
}

// Some file systems refuse only the first read, and a file may have been replaced since it was
// mapped.
std::string NgramTable::CompareWithMapping(const NgramTableOptions& options) {
  const int64_t ends[] = {0, num_rows_ - 1};
  std::vector<uint8_t> bytes(static_cast<size_t>(2 * row_bytes_));
  int error = 0;
  const std::string wrong = direct_->Read(ends, bytes.data(), &error);
  if (error == EINVAL || error == EOPNOTSUPP) {
    FallBack(options.path, std::strerror(error));
    return "";
  }
  if (!wrong.empty()) return wrong;
  for (int i = 0; i < 2; ++i) {
    if (std::memcmp(&bytes[i * row_bytes_], mapped_.Row(ends[i]), row_bytes_) != 0) {
      return options.path + ": row " + std::to_string(ends[i]) +
             " differs from the mapped file; it was replaced while it was open, start anew";
    }
  }
  return "";
}

std::string NgramTable::CheckRows(const char* what, std::span<const int64_t> rows) const {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows_) {
      return std::string(what) + ": rows[" + std::to_string(i) + "] is " + std::to_string(rows[i]) +
             ", outside [0, " + std::to_string(num_rows_) + ")";
    }
  }
  return "";
}

std::string NgramTable::ReadRows(const int64_t* rows, int64_t count, uint8_t* out) {
  const std::span<const int64_t> wanted(rows, static_cast<size_t>(count));
  std::string wrong = CheckRows("read_rows", wanted);
  if (!wrong.empty()) return wrong;
  const CountedTime time(&counters_.wait_us);
  counters_.rows.fetch_add(count);
  if (direct_.has_value()) return direct_->Read(wanted, out);
  mapped_.Read(wanted, out, [this] { counters_.Beat(); });
  return "";
}

std::string NgramTable::Prefetch(const int64_t* rows, int64_t count) {
  const std::span<const int64_t> wanted(rows, static_cast<size_t>(count));
  std::string wrong = CheckRows("prefetch", wanted);
  if (!wrong.empty() || mapped_.locked()) return wrong;
  counters_.ahead_dropped.fetch_add(count - queue_->Push(wanted));
  return "";
}

double NgramTable::Residency() const { return sees_residency_ ? mapped_.Residency() : -1.0; }

int64_t AddTable(std::shared_ptr<NgramTable> table) {
  return Slots<NgramTable>::Global().Add(std::move(table));
}

void RemoveTable(int64_t slot) { Slots<NgramTable>::Global().Remove(slot); }

std::shared_ptr<NgramTable> FindTable(int64_t slot) {
  return Slots<NgramTable>::Global().Find(slot);
}

}  // namespace strata
