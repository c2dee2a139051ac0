// Tests of ffi/weights/ngram_table.h on a real file, in every mode and with every engine that runs
// here. Built and run by tests/native/run. Argument: a folder for the file (default /tmp).

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <random>

#include "check.h"
#include "fake_engine.h"
#include "weights/ngram_table.h"

namespace strata {
namespace {

std::string folder = "/tmp";

// A table of random bytes at an odd place of a file, mapped.
class TableFile {
 public:
  TableFile(GgmlType type, int64_t num_rows, int64_t num_cols, int64_t offset) {
    options.type = FindType(static_cast<int64_t>(type));
    options.num_rows = num_rows;
    options.num_cols = num_cols;
    options.offset = offset;
    row_bytes = num_cols / options.type->block_values * options.type->block_bytes;
    std::mt19937_64 random(offset);
    bytes.resize(offset + num_rows * row_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    std::string name = folder + "/strata_table_XXXXXX";
    const int fd = mkstemp(name.data());
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    CHECK_EQ(fsync(fd), 0);
    mapping_ = mmap(nullptr, bytes.size(), PROT_READ, MAP_SHARED, fd, 0);
    CHECK(mapping_ != MAP_FAILED);
    close(fd);
    options.path = path_ = name;
    options.mapped = static_cast<const uint8_t*>(mapping_) + offset;
    options.timeout = std::chrono::seconds(20);
    // Wherever the tests run, the engines run too: without O_DIRECT they read through the page
    // cache.
    options.open_direct = [](const char* path) {
      const int direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
      const int opened = direct >= 0 ? direct : open(path, O_RDONLY | O_CLOEXEC);
      return opened >= 0 ? opened : -errno;
    };
  }
  ~TableFile() {
    munmap(mapping_, bytes.size());
    unlink(path_.c_str());
  }

  std::shared_ptr<NgramTable> Open() const {
    std::shared_ptr<NgramTable> table;
    CHECK_EQ(NgramTable::Open(options, &table), "");
    return table;
  }

  // The engine answers as the script says.
  std::shared_ptr<NgramTable> OpenScripted(const std::shared_ptr<Script>& script) {
    script->file = &bytes;
    options.mode = TableMode::kDirect;
    const int64_t slot_bytes = DirectRows::SlotBytes(row_bytes, 4096);
    options.make_engine = [=, depth = options.depth] {
      return std::make_unique<FakeEngine>(script, depth, slot_bytes);
    };
    return Open();
  }

  void CheckRead(NgramTable* table, const std::vector<int64_t>& rows) const {
    std::vector<uint8_t> out(rows.size() * row_bytes, 0xAA);
    CHECK_EQ(table->ReadRows(rows.data(), static_cast<int64_t>(rows.size()), out.data()), "");
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint8_t* expected = bytes.data() + options.offset + rows[i] * row_bytes;
      CHECK_EQ(std::memcmp(&out[i * row_bytes], expected, row_bytes), 0);
    }
  }

  std::string Failure(NgramTable* table, const std::vector<int64_t>& rows) const {
    std::vector<uint8_t> out(rows.size() * row_bytes);
    return table->ReadRows(rows.data(), static_cast<int64_t>(rows.size()), out.data());
  }

  std::vector<int64_t> RandomRows(int64_t count, int seed) const {
    std::mt19937_64 random(seed);
    std::vector<int64_t> rows(count);
    for (int64_t& row : rows) row = static_cast<int64_t>(random() % options.num_rows);
    return rows;
  }

  NgramTableOptions options;
  int64_t row_bytes;
  std::vector<uint8_t> bytes;

 private:
  std::string path_;
  void* mapping_;
};

void WaitUntil(const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!ready()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void GivesTheSameBytesInEveryMode() {
  struct Shape {
    GgmlType type;
    int64_t num_rows, num_cols, offset;
  };
  const Shape shapes[] = {
      {GgmlType::kIQ4_NL, 30011, 160, 4096 - 17},  // rows across pages, the file ends within a page
      {GgmlType::kQ8_0, 1, 160, 0},                // one row, less than a page
      {GgmlType::kF32, 300, 1024, 8192},           // a row is a page
      {GgmlType::kF32, 300, 1500, 4128},           // a row is more than a page
  };
  for (const Shape& shape : shapes) {
    TableFile file(shape.type, shape.num_rows, shape.num_cols, shape.offset);
    for (int variant = 0; variant < 6; ++variant) {
      file.options.mode = variant == 0   ? TableMode::kMmap
                          : variant == 1 ? TableMode::kRam
                                         : TableMode::kDirect;
      file.options.use_uring = variant % 2 == 0;
      file.options.cache_bytes = variant < 4 ? 1 << 20 : 0;
      file.options.depth = variant == 2 ? 7 : 256;
      const auto table = file.Open();
      if (shape.num_rows == 1)
        std::printf("  %s %s\n", table->how().c_str(), table->note().c_str());
      for (int seed = 0; seed < 4; ++seed) file.CheckRead(table.get(), file.RandomRows(999, seed));
      file.CheckRead(table.get(), {shape.num_rows - 1, 0, shape.num_rows - 1});
      file.CheckRead(table.get(), {});
    }
  }
}

void ReadsARepeatedRowOnceAndACachedRowNever() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  file.options.mode = TableMode::kDirect;
  const auto table = file.Open();
  const int64_t reads = table->counters().reads;
  file.CheckRead(table.get(), {500, 90000, 500, 500, 7000});
  CHECK_EQ(table->counters().reads - reads, 3);
  CHECK_EQ(table->counters().repeats.load(), 2);
  file.CheckRead(table.get(), {7000, 500, 90000});
  CHECK_EQ(table->counters().reads - reads, 3);
  CHECK_EQ(table->counters().cache_hits.load(), 3);
  file.CheckRead(table.get(), {20000, 20001, 20002});  // neighbours: 270 bytes, one read
  CHECK_EQ(table->counters().reads - reads, 4);
  CHECK_EQ(table->counters().rows.load(), 11);
}

void KeepsWithinASmallCache() {
  TableFile file(GgmlType::kIQ4_NL, 5000, 160, 64);
  file.options.mode = TableMode::kDirect;
  file.options.cache_bytes = 10 * 98;
  const auto table = file.Open();
  for (int seed = 0; seed < 20; ++seed) file.CheckRead(table.get(), file.RandomRows(100, seed % 5));
}

void FindsRowsThatWereReadAhead() {
  TableFile file(GgmlType::kIQ4_NL, 200000, 160, 64);
  file.options.mode = TableMode::kDirect;
  const auto table = file.Open();
  const std::vector<int64_t> rows = file.RandomRows(3000, 1);
  CHECK_EQ(table->Prefetch(rows.data(), 3000), "");
  file.CheckRead(table.get(), rows);  // whatever is ready by now
  WaitUntil([&] {
    file.CheckRead(table.get(), rows);
    const int64_t reads = table->counters().reads;
    file.CheckRead(table.get(), rows);
    return table->counters().reads == reads;
  });

  file.options.mode = TableMode::kMmap;
  const auto mapped = file.Open();
  CHECK_EQ(mapped->Prefetch(rows.data(), 3000), "");
  WaitUntil([&] { return mapped->counters().ahead_rows == 3000; });
}

void WaitsForARowThatIsBeingReadInsteadOfReadingItTwice() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  const auto script = std::make_shared<Script>();
  const auto table = file.OpenScripted(script);
  script->held = true;
  const int64_t row = 4321;
  CHECK_EQ(table->Prefetch(&row, 1), "");
  WaitUntil([&] { return script->started == 3; });  // two of Open and this one
  std::thread reader([&] { file.CheckRead(table.get(), {row}); });
  WaitUntil([&] { return table->counters().awaited == 1; });
  script->held = false;
  reader.join();
  CHECK_EQ(table->counters().reads.load(), 3);
}

void LeavesARowThatCouldNotBeReadAheadToWhoeverWantsIt() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  const auto script = std::make_shared<Script>();
  script->result = [](int n, int64_t, int32_t result) { return n == 2 ? -EIO : result; };
  const auto table = file.OpenScripted(script);
  const int64_t row = 4321;
  CHECK_EQ(table->Prefetch(&row, 1), "");
  WaitUntil([&] { return table->counters().ahead_dropped == 1; });
  file.CheckRead(table.get(), {row});
}

void NamesRowAndByteOfWhatCannotBeRead() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  const auto script = std::make_shared<Script>();
  const int64_t page = (64 + 50000 * 90) / 4096 * 4096;
  script->result = [=](int, int64_t offset, int32_t result) {
    return offset == page ? -EIO : result;
  };
  const auto table = file.OpenScripted(script);
  const std::string wrong = file.Failure(table.get(), {3, 50000, 70000});
  CHECK_CONTAINS(wrong, "row 50000 at byte 4500064 gave: Input/output error, 90 bytes expected");
  CHECK_CONTAINS(wrong, file.options.path);
  CHECK_CONTAINS(file.Failure(table.get(), {1, 100000}), "rows[1] is 100000, outside [0, 100000)");
  CHECK_CONTAINS(file.Failure(table.get(), {-1}), "rows[0] is -1, outside [0, 100000)");
  const int64_t outside = 100000;
  CHECK_CONTAINS(table->Prefetch(&outside, 1), "outside [0, 100000)");
  file.CheckRead(table.get(), {3, 70000});
}

void EndsAWaitForADiskThatHangs() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  const auto script = std::make_shared<Script>();
  script->hangs = [](int n) { return n == 2; };
  file.options.timeout = std::chrono::milliseconds(200);
  const auto table = file.OpenScripted(script);
  CHECK_CONTAINS(file.Failure(table.get(), {50000}), "row 50000 at byte 4500064 gave: no answer");
  file.CheckRead(table.get(), {50000});
}

void RefusesAFileThatWasShortened() {
  TableFile file(GgmlType::kIQ4_NL, 100000, 160, 64);
  file.options.mode = TableMode::kDirect;
  for (const bool uring : {true, false}) {
    file.options.use_uring = uring;
    const auto table = file.Open();
    CHECK_EQ(truncate(file.options.path.c_str(), 4500000), 0);
    CHECK_CONTAINS(file.Failure(table.get(), {50000}), "the file ends after");
    CHECK_CONTAINS(file.Failure(table.get(), {60000}), "the file ends after");
    file.CheckRead(table.get(), {49000});
    std::shared_ptr<NgramTable> again;
    CHECK_CONTAINS(NgramTable::Open(file.options, &again), "was replaced while it was open");
    const int fd = open(file.options.path.c_str(), O_WRONLY);
    CHECK_EQ(pwrite(fd, file.bytes.data(), file.bytes.size(), 0),
             static_cast<ssize_t>(file.bytes.size()));
    close(fd);
  }
}

void RefusesAFileThatWasReplaced() {
  TableFile file(GgmlType::kIQ4_NL, 1000, 160, 64);
  TableFile other(GgmlType::kIQ4_NL, 1000, 160, 64 + 32);
  file.options.mode = TableMode::kDirect;
  file.options.path = other.options.path;
  std::shared_ptr<NgramTable> table;
  CHECK_CONTAINS(NgramTable::Open(file.options, &table), "row 0 differs from the mapped file");
  file.options.path = folder + "/no such file";
  CHECK_CONTAINS(NgramTable::Open(file.options, &table), "cannot be opened: No such file");
}

void MapsWhereThereAreNoUnbufferedReads() {
  TableFile file(GgmlType::kIQ4_NL, 1000, 160, 64);
  const auto script = std::make_shared<Script>();
  script->result = [](int, int64_t, int32_t) { return -EINVAL; };
  const auto refused_later = file.OpenScripted(script);
  file.options.open_direct = [](const char*) { return -EINVAL; };
  for (const auto& table : {refused_later, file.Open()}) {
    CHECK(table->mode() == TableMode::kMmap);
    CHECK_CONTAINS(table->note(), "no unbuffered reads (Invalid argument)");
    CHECK_CONTAINS(table->note(), "--ple_io=mmap");
    file.CheckRead(table.get(), {0, 999, 5});
  }
}

void ReadsOnThreadsWhereIoUringIsRefused() {
  TableFile file(GgmlType::kIQ4_NL, 1000, 160, 64);
  file.options.mode = TableMode::kDirect;
  rlimit before = {};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = dup(0);
  close(next);
  rlimit room_for_the_file = before;
  room_for_the_file.rlim_cur = static_cast<rlim_t>(next) + 1;
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &room_for_the_file), 0);
  const auto table = file.Open();
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK_EQ(table->how(), "unbuffered reads on 16 threads");
  CHECK_CONTAINS(table->note(), "io_uring is not to be had (");
  file.CheckRead(table.get(), {0, 999, 5});
}

void RefusesTablesThatCannotBe() {
  TableFile file(GgmlType::kIQ4_NL, 1000, 160, 64);
  std::shared_ptr<NgramTable> table;
  const auto error_with = [&](auto change) {
    NgramTableOptions options = file.options;
    change(&options);
    return NgramTable::Open(options, &table);
  };
  CHECK_CONTAINS(error_with([](auto* o) { o->num_cols = 161; }), "whole blocks");
  CHECK_CONTAINS(error_with([](auto* o) { o->type = nullptr; }), "known type");
  CHECK_CONTAINS(error_with([](auto* o) { o->num_rows = INT64_MAX; }), "rows of 90 bytes");
  CHECK_CONTAINS(error_with([](auto* o) { o->num_cols = int64_t{1} << 40; }), "at most 1048576");
  CHECK_CONTAINS(error_with([](auto* o) { o->depth = 0; }), "depth 0");
  CHECK_CONTAINS(error_with([](auto* o) { o->mapped = nullptr; }), "no place");
}

void LoadsAndLocks() {
  TableFile file(GgmlType::kIQ4_NL, 200000, 160, 4000);
  file.options.mode = TableMode::kRam;
  const auto table = file.Open();
  const int error = table->Lock();  // 18 MB: more than a common limit, so either way is fine
  CHECK_EQ(table->locked(), error == 0);
  std::printf("  lock: %s\n", error == 0 ? "yes" : std::strerror(error));
  int64_t loaded = 0, calls = 0;
  for (; loaded < 200000 * 90; ++calls) CHECK_EQ(table->Load(0.0, &loaded), "");
  CHECK_EQ(loaded, 200000 * 90);
  CHECK_EQ(calls, 18);  // a MiB each, the last one is not full
  CHECK_EQ(table->Load(1.0, &loaded), "");
  CHECK_EQ(table->Residency(), 1.0);
  file.CheckRead(table.get(), file.RandomRows(1000, 1));
}

void ServesManyThreadsAtOnce() {
  TableFile file(GgmlType::kIQ4_NL, 20000, 160, 64);
  file.options.mode = TableMode::kDirect;
  file.options.cache_bytes = 3000 * 98;  // rows push each other out all the time
  file.options.depth = 16;
  for (const bool uring : {true, false}) {
    file.options.use_uring = uring;
    const auto table = file.Open();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int step = 0; step < 30; ++step) {
          const auto ahead = file.RandomRows(200, 1000 + step + 1);  // what the others want next
          CHECK_EQ(table->Prefetch(ahead.data(), 200), "");
          file.CheckRead(table.get(), file.RandomRows(200, 1000 + step));
          file.CheckRead(table.get(), file.RandomRows(17, t * 100 + step));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

void ClosesWhileRowsAreReadAhead() {
  TableFile file(GgmlType::kIQ4_NL, 200000, 160, 64);
  file.options.mode = TableMode::kDirect;
  for (int i = 0; i < 10; ++i) {
    file.options.use_uring = i % 2 == 0;
    const auto table = file.Open();
    const auto rows = file.RandomRows(5000, i);
    CHECK_EQ(table->Prefetch(rows.data(), 5000), "");
    std::this_thread::sleep_for(std::chrono::microseconds(i * 300));
  }
}

void ReusesTheLowestSlotAndKeepsATableThatIsInUse() {
  TableFile file(GgmlType::kIQ4_NL, 1000, 160, 64);
  const int64_t first = AddTable(file.Open());
  const int64_t second = AddTable(file.Open());
  CHECK_EQ(second, first + 1);
  const auto held = FindTable(first);
  RemoveTable(first);
  CHECK(FindTable(first) == nullptr);
  CHECK(FindTable(-1) == nullptr && FindTable(second + 1) == nullptr);
  file.CheckRead(held.get(), {1, 2});
  CHECK_EQ(AddTable(file.Open()), first);
  RemoveTable(first);
  RemoveTable(second);
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  using namespace strata;
  if (argc > 1) folder = argv[1];
  RUN(GivesTheSameBytesInEveryMode);
  RUN(ReadsARepeatedRowOnceAndACachedRowNever);
  RUN(KeepsWithinASmallCache);
  RUN(FindsRowsThatWereReadAhead);
  RUN(WaitsForARowThatIsBeingReadInsteadOfReadingItTwice);
  RUN(LeavesARowThatCouldNotBeReadAheadToWhoeverWantsIt);
  RUN(NamesRowAndByteOfWhatCannotBeRead);
  RUN(EndsAWaitForADiskThatHangs);
  RUN(RefusesAFileThatWasShortened);
  RUN(RefusesAFileThatWasReplaced);
  RUN(MapsWhereThereAreNoUnbufferedReads);
  RUN(ReadsOnThreadsWhereIoUringIsRefused);
  RUN(RefusesTablesThatCannotBe);
  RUN(LoadsAndLocks);
  RUN(ServesManyThreadsAtOnce);
  RUN(ClosesWhileRowsAreReadAhead);
  RUN(ReusesTheLowestSlotAndKeepsATableThatIsInUse);
  std::printf("ok\n");
}
