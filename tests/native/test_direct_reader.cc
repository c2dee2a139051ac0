// Tests of ffi/weights/direct_reader.h with an engine that answers as each test says. Built and run
// by tests/native/run.

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "check.h"
#include "fake_engine.h"
#include "weights/direct_reader.h"

namespace strata {
namespace {

constexpr int kDepth = 4;
constexpr int64_t kPage = 4096;

std::vector<uint8_t> File(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i / kPage + i);
  return bytes;
}

const std::vector<uint8_t> kFile = File(20 * kPage + 100);

std::shared_ptr<Script> Normal() {
  auto script = std::make_shared<Script>();
  script->file = &kFile;
  return script;
}

DirectReader Reader(const std::shared_ptr<Script>& script, int timeout_ms = 10000) {
  return DirectReader([=] { return std::make_unique<FakeEngine>(script, kDepth, kPage); }, kDepth,
                      std::chrono::milliseconds(timeout_ms));
}

std::vector<PageRead> Pages(int count) {
  std::vector<PageRead> reads;
  for (int i = 0; i < count; ++i) {
    const int64_t offset = i * kPage;
    const int64_t needed = std::min<int64_t>(kPage, static_cast<int64_t>(kFile.size()) - offset);
    reads.push_back({offset, static_cast<int32_t>(kPage), static_cast<int32_t>(needed)});
  }
  return reads;
}

// Reads, and checks every byte that arrives; *arrived counts.
std::optional<ReadFault> ReadChecked(DirectReader* reader, const std::vector<PageRead>& reads,
                                     int* arrived) {
  *arrived = 0;
  return reader->Read(reads, [&](int64_t read, const uint8_t* bytes) {
    ++*arrived;
    CHECK_EQ(std::memcmp(bytes, kFile.data() + reads[read].offset, reads[read].needed), 0);
  });
}

void ReadsEverythingWithNoMoreInFlightThanSlots() {
  const auto script = Normal();
  DirectReader reader = Reader(script);
  int arrived = 0;
  CHECK(!ReadChecked(&reader, Pages(21), &arrived).has_value());
  CHECK_EQ(arrived, 21);  // the last page holds 100 bytes only
  CHECK_EQ(script->most_in_flight, kDepth);
  CHECK(!ReadChecked(&reader, {}, &arrived).has_value());
  CHECK_EQ(arrived, 0);
}

void RepeatsWhatWasInterrupted() {
  const auto script = Normal();
  script->result = [](int n, int64_t, int32_t result) {
    return n % 3 == 0 ? -EINTR : n % 3 == 1 ? std::min(result, 512) : result;
  };
  DirectReader reader = Reader(script);
  int arrived = 0;
  CHECK(!ReadChecked(&reader, Pages(1), &arrived).has_value());
  CHECK_EQ(arrived, 1);
  CHECK_EQ(script->started.load(), 3);
}

void NamesTheReadThatFailed() {
  const auto script = Normal();
  script->result = [](int, int64_t offset, int32_t result) {
    return offset == 7 * kPage ? -EIO : result;
  };
  DirectReader reader = Reader(script);
  int arrived = 0;
  const auto fault = ReadChecked(&reader, Pages(10), &arrived);
  CHECK(fault.has_value());
  CHECK_EQ(fault->read, 7);
  CHECK_EQ(fault->error, EIO);
  CHECK_EQ(fault->what, "Input/output error");

  script->result = nullptr;
  CHECK(!ReadChecked(&reader, Pages(10), &arrived).has_value());
  CHECK_EQ(script->engines, 1);  // a failed read does not cost the engine
}

void NeverHandsOutAShortRead() {
  const auto script = Normal();
  script->result = [](int, int64_t offset, int32_t result) {
    return offset == 2 * kPage ? 512 : result;
  };
  DirectReader reader = Reader(script);
  int arrived = 0;
  const auto fault = ReadChecked(&reader, Pages(4), &arrived);
  CHECK(fault.has_value());
  CHECK_EQ(fault->read, 2);
  CHECK_EQ(fault->what, "the file ends after 512 of 4096 bytes");
  CHECK_EQ(arrived, 3);
}

void GivesUpOnADiskThatDoesNotAnswerAndStartsAnew() {
  const auto script = Normal();
  script->hangs = [](int n) { return n == 5; };
  DirectReader reader = Reader(script, 200);
  int arrived = 0;
  const auto fault = ReadChecked(&reader, Pages(8), &arrived);
  CHECK(fault.has_value());
  CHECK_EQ(fault->error, ETIMEDOUT);
  CHECK_EQ(fault->read, 5);
  CHECK_EQ(fault->what, "no answer within 200 ms");

  CHECK(!ReadChecked(&reader, Pages(8), &arrived).has_value());
  CHECK_EQ(arrived, 8);
  CHECK_EQ(script->engines, 2);
}

void TakesASlowDiskForASlowDisk() {
  const auto script = Normal();
  script->pause = std::chrono::milliseconds(60);  // 20 of them: twice the time-out
  DirectReader reader = Reader(script, 600);
  int arrived = 0;
  CHECK(!ReadChecked(&reader, Pages(20), &arrived).has_value());
  CHECK_EQ(arrived, 20);
}

void EndsWhenItIsCancelled() {
  const auto script = Normal();
  script->hangs = [](int n) { return n == 0; };
  DirectReader reader = Reader(script, 60000);
  std::atomic<int> arrived{0};
  std::thread canceller([&] {
    while (arrived < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    reader.Cancel();
  });
  const auto fault = reader.Read(Pages(3), [&](int64_t, const uint8_t*) { ++arrived; });
  CHECK(fault.has_value());
  CHECK_EQ(fault->error, ECANCELED);
  CHECK_EQ(arrived.load(), 2);
  canceller.join();
  int more = 0;
  CHECK_EQ(ReadChecked(&reader, Pages(3), &more)->error, ECANCELED);
}

void ReportsAnEngineThatCannotBeMade() {
  DirectReader reader([] { return nullptr; }, kDepth, std::chrono::seconds(1));
  int arrived = 0;
  CHECK_EQ(ReadChecked(&reader, Pages(3), &arrived)->error, ENOMEM);
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(ReadsEverythingWithNoMoreInFlightThanSlots);
  RUN(RepeatsWhatWasInterrupted);
  RUN(NamesTheReadThatFailed);
  RUN(NeverHandsOutAShortRead);
  RUN(GivesUpOnADiskThatDoesNotAnswerAndStartsAnew);
  RUN(TakesASlowDiskForASlowDisk);
  RUN(EndsWhenItIsCancelled);
  RUN(ReportsAnEngineThatCannotBeMade);
  std::printf("ok\n");
}
