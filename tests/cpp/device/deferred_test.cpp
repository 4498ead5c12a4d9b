// The deferred executor finds what a GPU would punish: missing waits, undeclared accesses, host
// access to memory in flight, uninitialised memory. And what both executors share: errors that
// stick, buffers freed early, the flight recorder.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "device/cpu/cpu_device.h"

// Under AddressSanitizer a request for too much memory must fail as it does elsewhere.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace polyreme {
namespace {

constexpr size_t kBytes = 4096;

std::unique_ptr<Device> make_deferred(uint64_t seed = 0) {
  return make_cpu_device({.executor = CpuExecutor::kDeferred, .schedule_seed = seed});
}

float* floats(const std::shared_ptr<Buffer>& buffer) { return static_cast<float*>(buffer->address()); }

Access access(const std::shared_ptr<Buffer>& buffer, bool write, int64_t begin = 0, int64_t end = kBytes) {
  return {buffer, begin, end, write};
}

// to[0] = from[0] + 1
void enqueue_increment(Stream& stream, const char* name, const std::shared_ptr<Buffer>& from,
                       const std::shared_ptr<Buffer>& to) {
  float* const source = floats(from);
  float* const target = floats(to);
  as_cpu(stream).enqueue({name}, {access(from, false), access(to, true)},
                         [=](const CpuContext&) { *target = *source + 1; });
}

void enqueue_set(Stream& stream, const char* name, const std::shared_ptr<Buffer>& to, float value) {
  float* const target = floats(to);
  as_cpu(stream).enqueue({name}, {access(to, true)}, [=](const CpuContext&) { *target = value; });
}

float read_host(const std::shared_ptr<Buffer>& buffer) {
  const HostMapping mapping(buffer);
  return *floats(buffer);
}

template <typename Statement>
std::string device_error(Statement&& statement) {
  try {
    statement();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "no DeviceError";
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

TEST(Deferred, NothingRunsBeforeItMust) {
  const auto device = make_deferred();
  const auto stream = device->create_stream("compute");
  bool ran = false;
  as_cpu(*stream).enqueue({"op"}, {}, [&](const CpuContext&) { ran = true; });
  EXPECT_FALSE(ran);
  stream->synchronize();
  EXPECT_TRUE(ran);
}

TEST(Deferred, AMissingWaitNamesBothOperations) {
  for (const bool second_writes : {false, true}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const auto device = make_deferred(seed);
      const auto compute = device->create_stream("compute"), comm = device->create_stream("comm");
      const auto gradient = device->allocate(kBytes, "gradient"), other = device->allocate(kBytes, "other");
      enqueue_set(*comm, "set", other, 1);
      enqueue_set(*compute, "backward", gradient, 1);
      const std::string text = device_error([&] {
        if (second_writes)
          enqueue_increment(*comm, "receive", other, gradient);
        else
          enqueue_increment(*comm, "reduce", gradient, other);
      });
      expect_parts(text, {second_writes ? "'receive'" : "'reduce'", "'comm'", "'gradient'", "'backward'",
                          "'compute'", second_writes ? "writes" : "reads", "wait for it first"});
    }
  }
}

TEST(Deferred, AWriteAfterAnUnorderedReadIsFound) {
  const auto device = make_deferred();
  const auto compute = device->create_stream("compute"), comm = device->create_stream("comm");
  const auto a = device->allocate(kBytes, "a"), b = device->allocate(kBytes, "b");
  enqueue_set(*compute, "produce", a, 1);
  const auto event = device->create_event();
  compute->record(*event);
  comm->wait(*event);
  enqueue_increment(*comm, "send", a, b);
  expect_parts(device_error([&] { enqueue_set(*compute, "reuse", a, 2); }), {"'reuse'", "'send'", "reads"});
}

TEST(Deferred, AnOrderedReadDoesNotHideTheWriteBeforeIt) {
  const auto device = make_deferred();
  const auto compute = device->create_stream("compute"), comm = device->create_stream("comm");
  const auto careless = device->create_stream("careless");
  const auto a = device->allocate(kBytes, "a"), b = device->allocate(kBytes, "b");
  const auto c = device->allocate(kBytes, "c");
  enqueue_set(*compute, "produce", a, 1);
  const auto event = device->create_event();
  compute->record(*event);
  comm->wait(*event);
  enqueue_increment(*comm, "send", a, b);
  expect_parts(device_error([&] { enqueue_increment(*careless, "peek", a, c); }), {"'peek'", "'produce'"});
}

TEST(Deferred, BothStreamsMayReadAndWorkOnSeparateBytes) {
  const auto device = make_deferred();
  const auto one = device->create_stream("one"), two = device->create_stream("two");
  const auto a = device->allocate(kBytes, "a");
  const auto nothing = [](const CpuContext&) {};
  as_cpu(*one).enqueue({"low"}, {access(a, true, 0, 64)}, nothing);
  EXPECT_NO_THROW(as_cpu(*two).enqueue({"high"}, {access(a, true, 64, 128)}, nothing));
  expect_parts(device_error([&] { as_cpu(*two).enqueue({"both"}, {access(a, false, 60, 128)}, nothing); }),
               {"'both'", "'low'", "[60, 128)"});
  one->synchronize();
  EXPECT_NO_THROW(as_cpu(*two).enqueue({"both"}, {access(a, false, 60, 128)}, nothing));
  EXPECT_NO_THROW(as_cpu(*one).enqueue({"read"}, {access(a, false, 0, 64)}, nothing));
}

// Three streams hand a number on and use their buffers again, ordered by events alone.
float run_relay(uint64_t seed) {
  const auto device = make_deferred(seed);
  const std::unique_ptr<Stream> streams[3] = {device->create_stream("a"), device->create_stream("b"),
                                              device->create_stream("c")};
  const std::shared_ptr<Buffer> buffers[3] = {device->allocate(kBytes, "x"), device->allocate(kBytes, "y"),
                                              device->allocate(kBytes, "z")};
  const std::unique_ptr<Event> events[3] = {device->create_event(), device->create_event(),
                                            device->create_event()};
  enqueue_set(*streams[0], "start", buffers[0], 0);
  streams[0]->record(*events[0]);
  for (int i = 0; i < 12; ++i) {
    const int from = i % 3, to = (i + 1) % 3;
    streams[to]->wait(*events[from]);
    enqueue_increment(*streams[to], "pass on", buffers[from], buffers[to]);
    streams[to]->record(*events[to]);
  }
  events[0]->synchronize();
  return read_host(buffers[0]);
}

TEST(Deferred, WithItsWaitsAProgramRunsUnderEverySchedule) {
  for (uint64_t seed = 0; seed < 200; ++seed) EXPECT_EQ(run_relay(seed), 12.0f) << seed;
}

TEST(Deferred, SchedulesDifferAndASeedReplays) {
  const auto order = [](uint64_t seed) {
    const auto device = make_deferred(seed);
    const auto one = device->create_stream("one"), two = device->create_stream("two");
    std::string result;
    for (int i = 0; i < 8; ++i) {
      as_cpu(*one).enqueue({"one"}, {}, [&](const CpuContext&) { result += '1'; });
      as_cpu(*two).enqueue({"two"}, {}, [&](const CpuContext&) { result += '2'; });
    }
    one->synchronize();
    two->synchronize();
    return result;
  };
  EXPECT_EQ(order(1), order(1));
  int different = 0;
  for (uint64_t seed = 2; seed < 12; ++seed) different += order(seed) != order(1);
  EXPECT_GE(different, 8);
}

TEST(Deferred, TheHostMustWaitBeforeItMaps) {
  const auto device = make_deferred();
  const auto stream = device->create_stream("compute");
  const auto a = device->allocate(kBytes, "loss"), b = device->allocate(kBytes, "unrelated");
  enqueue_set(*stream, "forward", a, 3);
  expect_parts(device_error([&] { read_host(a); }), {"the host", "'loss'", "'forward'"});
  EXPECT_NO_THROW(read_host(b));
  stream->synchronize();
  EXPECT_EQ(read_host(a), 3.0f);
}

TEST(Deferred, WaitingForAnEventIsEnoughForTheHost) {
  const auto device = make_deferred();
  const auto stream = device->create_stream("compute");
  const auto a = device->allocate(kBytes, "a"), b = device->allocate(kBytes, "b");
  const auto event = device->create_event();
  event->synchronize();  // never recorded: returns at once
  enqueue_set(*stream, "first", a, 1);
  stream->record(*event);
  enqueue_set(*stream, "second", b, 2);
  event->synchronize();
  EXPECT_EQ(read_host(a), 1.0f);
  expect_parts(device_error([&] { read_host(b); }), {"'second'"});
}

TEST(DeferredDeathTest, AnUndeclaredAccessDies) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto device = make_deferred();
  const auto stream = device->create_stream("compute");
  const auto declared = device->allocate(kBytes, "declared"), hidden = device->allocate(kBytes, "hidden");
  float* const target = floats(hidden);
  as_cpu(*stream).enqueue({"careless"}, {access(declared, true)}, [=](const CpuContext&) { *target = 1; });
  EXPECT_DEATH(stream->synchronize(), "");
  EXPECT_DEATH(*floats(declared) = 1, "");
  // Memory is closed again after an operation that declared it, for others and for the host.
  const auto other = device->create_stream("other");
  enqueue_set(*other, "careful", hidden, 1);
  other->synchronize();
  EXPECT_DEATH(stream->synchronize(), "");
  EXPECT_DEATH(*floats(hidden) = 1, "");
  // What is left in the stream must not run here.
  const HostMapping mapping(hidden);
  stream->synchronize();
}

TEST(Deferred, FreshMemoryIsNan) {
  const auto device = make_deferred();
  const auto a = device->allocate(kBytes, "a");
  const HostMapping mapping(a);
  for (size_t i = 0; i < kBytes / sizeof(float); ++i) ASSERT_TRUE(std::isnan(floats(a)[i]));
}

TEST(Deferred, ADestroyedStreamHasDoneItsWork) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto device = make_deferred(seed);
    const auto first = device->create_stream("first"), last = device->create_stream("last");
    const auto a = device->allocate(kBytes, "a"), b = device->allocate(kBytes, "b");
    const auto event = device->create_event();
    enqueue_set(*first, "set", a, 1);
    first->record(*event);
    {
      const auto middle = device->create_stream("middle");
      middle->wait(*event);
      enqueue_increment(*middle, "increment", a, b);
      middle->record(*event);
    }
    last->wait(*event);
    enqueue_increment(*last, "increment again", b, a);
    event->synchronize();
    last->synchronize();
    EXPECT_EQ(read_host(a), 3.0f);
  }
}

class BothExecutors : public ::testing::TestWithParam<CpuExecutor> {
 protected:
  std::unique_ptr<Device> device_ = make_cpu_device({.executor = GetParam()});
  std::unique_ptr<Stream> stream_ = device_->create_stream("compute");
};

std::string executor_name(const ::testing::TestParamInfo<CpuExecutor>& executor) {
  return executor.param == CpuExecutor::kImmediate ? "Immediate" : "Deferred";
}
INSTANTIATE_TEST_SUITE_P(Executors, BothExecutors,
                         ::testing::Values(CpuExecutor::kImmediate, CpuExecutor::kDeferred), executor_name);

TEST_P(BothExecutors, TheFirstErrorSticksUntilItWasSeen) {
  const auto other = device_->create_stream("other");
  int later = 0;
  as_cpu(*stream_).enqueue({"bad"}, {}, [](const CpuContext&) { throw InvalidArgument("the first"); });
  as_cpu(*stream_).enqueue({"worse"}, {},
                           [&](const CpuContext&) { ++later, throw InvalidArgument("the second"); });
  as_cpu(*other).enqueue({"good"}, {}, [&](const CpuContext&) { later += 10; });
  try {
    stream_->synchronize();
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  EXPECT_NO_THROW(other->synchronize());
  EXPECT_EQ(later, 10);
  EXPECT_NO_THROW(stream_->synchronize());
  as_cpu(*stream_).enqueue({"again"}, {}, [&](const CpuContext&) { ++later; });
  stream_->synchronize();
  EXPECT_EQ(later, 11);
}

TEST_P(BothExecutors, AnErrorFollowsEvents) {
  for (const StreamKind from : {StreamKind::kCompute, StreamKind::kBackground})
    for (const StreamKind to : {StreamKind::kCompute, StreamKind::kBackground}) {
      const auto bad = device_->create_stream("bad", from), waiting = device_->create_stream("waiting", to);
      const auto before = device_->create_event(), after = device_->create_event();
      int ran = 0;
      const auto enqueue = [&](int value) {
        as_cpu(*waiting).enqueue({"op"}, {}, [&ran, value](const CpuContext&) { ran += value; });
      };
      bad->record(*before);
      as_cpu(*bad).enqueue({"bad"}, {}, [](const CpuContext&) { throw InvalidArgument("the cause"); });
      bad->record(*after);
      waiting->wait(*before);
      enqueue(1);
      waiting->wait(*after);
      enqueue(10);
      for (Stream* stream : {waiting.get(), bad.get()}) EXPECT_THROW(stream->synchronize(), InvalidArgument);
      EXPECT_EQ(ran, 1);
      enqueue(100);
      waiting->synchronize();
      EXPECT_EQ(ran, 101);
    }
}

TEST_P(BothExecutors, BuffersMayBeFreedWhileInUse) {
  const int64_t before = device_->memory().in_use_bytes;
  auto result = device_->allocate(kBytes, "result");
  {
    auto temporary = device_->allocate(kBytes, "temporary");
    enqueue_set(*stream_, "set", temporary, 5);
    enqueue_increment(*stream_, "increment", temporary, result);
  }
  stream_->synchronize();
  EXPECT_EQ(read_host(result), 6.0f);
  result.reset();
  EXPECT_EQ(device_->memory().in_use_bytes, before);
  EXPECT_GE(device_->memory().peak_bytes - before, static_cast<int64_t>(2 * kBytes));
}

TEST_P(BothExecutors, MemoryIsAlignedAndFailsWithItsLabel) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{100}, size_t{5} << 20})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(device_->allocate(size, "a")->address()) % 64, 0u);
  try {
    device_->allocate(size_t{1} << 60, "huge");
    ADD_FAILURE();
  } catch (const OutOfMemory& error) {
    expect_parts(error.what(), {"'huge'", "1152921504606846976 bytes"});
  }
}

TEST_P(BothExecutors, TheRecorderSeesWhatRan) {
  FlightRecorder& recorder = device_->recorder();
  const auto second = device_->create_stream("second");
  const auto enqueue = [&](Stream& stream, const OpInfo& info) {
    as_cpu(stream).enqueue(info, {}, [](const CpuContext&) {});
    stream.synchronize();
  };
  enqueue(*stream_, {"unseen"});
  EXPECT_EQ(recorder.total(), 0u);
  recorder.enable(true);
  enqueue(*stream_, {"gemm", OpKind::kGemm, 100.0, 0});
  enqueue(*second, {"all_reduce", OpKind::kCollective, 0, 64});
  recorder.enable(false);
  enqueue(*stream_, {"unseen"});
  const std::vector<Span> spans = recorder.spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_STREQ(spans[0].name, "gemm");
  EXPECT_EQ(spans[0].kind, OpKind::kGemm);
  EXPECT_EQ(spans[0].flops, 100.0);
  EXPECT_EQ(spans[1].bytes, 64);
  EXPECT_NE(spans[0].stream, spans[1].stream);
  for (uint64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(spans[i].sequence, i);
    EXPECT_LE(spans[i].start_ns, spans[i].end_ns);
  }
  recorder.clear();
  EXPECT_TRUE(recorder.spans().empty());
}

TEST(FlightRecorder, KeepsTheLastSpans) {
  FlightRecorder recorder(4);
  for (int i = 0; i < 10; ++i) recorder.record({.name = "op", .bytes = i});
  EXPECT_EQ(recorder.total(), 10u);
  const auto spans = recorder.spans();
  ASSERT_EQ(spans.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(spans[static_cast<size_t>(i)].bytes, 6 + i);
  EXPECT_STREQ(op_kind_name(OpKind::kOther), "other");
  EXPECT_STREQ(op_kind_name(OpKind::kCopy), "copy");
}

TEST(CpuDevice, RejectsBadOptions) {
  EXPECT_THROW(make_cpu_device({.num_threads = 0}), InvalidArgument);
  EXPECT_THROW(make_cpu_device({.isa = "sse9"}), InvalidArgument);
  EXPECT_EQ(make_cpu_device({.num_threads = 2, .isa = "avx2"})->description(), "cpu, 2 threads, avx2");
}

TEST(CpuDevice, FreedBlocksAreReused) {
  const auto device = make_cpu_device({});
  void* const address = device->allocate(10000, "a")->address();
  EXPECT_EQ(device->allocate(10000, "b")->address(), address);
  EXPECT_EQ(device->memory().in_use_bytes, 0);
  EXPECT_GE(device->memory().reserved_bytes, 10000);
  device->reset_peak_memory();
  EXPECT_EQ(device->memory().peak_bytes, 0);
}

}  // namespace
}  // namespace polyreme
