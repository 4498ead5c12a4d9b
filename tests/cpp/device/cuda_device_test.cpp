// The CUDA device over the emulated runtime (tests/emulator/fake_gpu.h).
#include "device/cuda/cuda_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "common/error_text.h"
#include "device/cpu/cpu_device.h"
#include "device/cuda/cuda_table.h"
#include "emulator/fake_gpu.h"

extern "C" const PolyremeCudaTable* polyreme_cuda_table();

namespace polyreme {
namespace {

using testing::error_text;
using testing::expect_parts;

class EmulatedCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::reset(2, 7);
    device_ = make_cuda_device(*polyreme_cuda_table(), 0);
  }
  std::vector<int> read(const std::shared_ptr<Buffer>& buffer, size_t count, Stream& stream) {
    std::vector<int> values(count);
    copy_to_host(values.data(), buffer, 0, static_cast<int64_t>(count * sizeof(int)), stream);
    stream.synchronize();
    return values;
  }
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(EmulatedCuda, ProbeAndDescription) {
  EXPECT_EQ(polyreme_cuda_table()->self_test(1).code, 0);
  EXPECT_EQ(device_->description(), "cuda:0, emulated GPU, compute capability 9.0");
  EXPECT_EQ(device_->uuid(), "GPU-66616b65-3000-0000-0000-000000000000");
  EXPECT_NE(make_cuda_device(*polyreme_cuda_table(), 1)->uuid(), device_->uuid());
  expect_parts(error_text<NotAvailable>([] { make_cuda_device(*polyreme_cuda_table(), 2); }),
               {"cuda:2", "sees 2 GPUs"});
}

TEST_F(EmulatedCuda, CopiesArePartOfTheStream) {
  const auto stream = device_->create_stream("test");
  const auto buffer = device_->allocate(400, "test");
  const auto pinned = allocate_pinned(*device_, 400);
  std::iota(static_cast<int*>(pinned.get()), static_cast<int*>(pinned.get()) + 100, 5);
  copy_from_host(buffer, 0, pinned.get(), 400, *stream);
  const std::vector<int> values = read(buffer, 100, *stream);
  EXPECT_EQ(values.front(), 5);
  EXPECT_EQ(values.back(), 104);
  EXPECT_THROW(copy_from_host(buffer, 4, pinned.get(), 400, *stream), InvalidArgument);
  EXPECT_THROW(copy_to_host(pinned.get(), buffer, -4, 4, *stream), InvalidArgument);
}

TEST_F(EmulatedCuda, EventsOrderStreams) {
  const auto first = device_->create_stream("first"), second = device_->create_stream("second");
  const auto buffer = device_->allocate(4, "test");
  const auto written = device_->create_event(), read_back = device_->create_event();
  for (int value = 0; value < 200; ++value) {
    copy_from_host(buffer, 0, &value, 4, *first);
    first->record(*written);
    second->wait(*written);
    int got = -1;
    copy_to_host(&got, buffer, 0, 4, *second);
    second->record(*read_back);
    first->wait(*read_back);
    read_back->synchronize();
    ASSERT_EQ(got, value);
    EXPECT_TRUE(as_cuda(*written).is_reached());
  }
}

TEST_F(EmulatedCuda, StreamsOwnBuffersUntilTheyPassed) {
  const auto stream = device_->create_stream("test");
  const int value = 3;
  auto buffer = device_->allocate(4, "test");
  const void* address = buffer->address();
  copy_from_host(buffer, 0, &value, 4, *stream);
  buffer.reset();
  EXPECT_GT(device_->memory().in_use_bytes, 0);
  stream->synchronize();
  EXPECT_EQ(device_->memory().in_use_bytes, 0);
  EXPECT_EQ(device_->memory().peak_bytes, 512);
  EXPECT_EQ(device_->allocate(100, "again")->address(), address) << "a freed block was not reused";
  EXPECT_EQ(device_->memory().reserved_bytes, 512);
}

TEST_F(EmulatedCuda, MemoryThatIsOutIsTold) {
  auto half = device_->allocate(size_t{80} << 20, "half");
  expect_parts(error_text<OutOfMemory>([&] { device_->allocate(size_t{80} << 20, "other half"); }),
               {"out of memory on cuda:0", "'other half'", "most of it by 'half' 83886080 bytes in 1 buffer",
                "cudaErrorMemoryAllocation"});
  half.reset();
  EXPECT_NE(device_->allocate(size_t{100} << 20, "more"), nullptr) << "the cache was not given back";
}

TEST_F(EmulatedCuda, G15PinnedMemoryThatIsOutIsTold) {
  fake_gpu::fail_call("cudaMallocHost", 1, cudaErrorMemoryAllocation);
  expect_parts(error_text<OutOfMemory>([&] { allocate_pinned(*device_, 4096); }),
               {"out of page-locked memory: 4096 bytes", "cudaErrorMemoryAllocation"});
  EXPECT_NE(allocate_pinned(*device_, 4096), nullptr);
}

TEST_F(EmulatedCuda, AnIllegalAddressStaysWithItsGpu) {
  const auto stream = device_->create_stream("test");
  const auto buffer = device_->allocate(4, "test");
  const auto other = make_cuda_device(*polyreme_cuda_table(), 1);
  fake_gpu::break_gpu(0);
  for (int i = 0; i < 2; ++i)
    expect_parts(error_text<DeviceError>([&] { stream->synchronize(); }),
                 {"cuda:0: cudaStreamSynchronize failed: cudaErrorIllegalAddress (700)"});
  EXPECT_NE(other->create_stream("test"), nullptr);
}

TEST_F(EmulatedCuda, TheHostMustCopy) {
  const auto buffer = device_->allocate(4, "test");
  expect_parts(error_text<DeviceError>([&] { const HostMapping mapping(buffer); }),
               {"cuda:0", "not visible to the host", "copy_to_host"});
  EXPECT_DEATH(*static_cast<volatile int*>(buffer->address()) = 1, "");
}

TEST_F(EmulatedCuda, EachFailedCallIsADeviceErrorThatNamesIt) {
  const auto stream = device_->create_stream("test");
  const auto buffer = device_->allocate(4, "test");
  const auto event = device_->create_event();
  const int value = 1;
  const auto fails = [&](const char* function, const std::function<void()>& call) {
    fake_gpu::fail_call(function, 1, cudaErrorIllegalAddress);
    expect_parts(error_text<DeviceError>(call), {"cuda:0: ", function, "cudaErrorIllegalAddress (700)"});
  };
  fails("cudaMemcpyAsync", [&] { copy_from_host(buffer, 0, &value, 4, *stream); });
  fails("cudaStreamSynchronize", [&] { stream->synchronize(); });
  fails("cudaEventCreate", [&] { device_->create_event(); });
  fails("cudaStreamCreate", [&] { device_->create_stream("other"); });
  fails("cudaEventRecord", [&] { stream->record(*event); });
  fails("cudaStreamWaitEvent", [&] { stream->wait(*event); });
  fails("cudaEventSynchronize", [&] { event->synchronize(); });
  fails("cudaEventQuery", [&] { as_cuda(*event).is_reached(); });
  EXPECT_EQ(read(buffer, 1, *stream).size(), 1u) << "usable after all of them";
}

TEST_F(EmulatedCuda, G6TheCurrentGpuOfTheThreadIsRestored) {
  const PolyremeCudaTable& table = *polyreme_cuda_table();
  table.set_device(1);
  const auto stream = device_->create_stream("test");
  const auto buffer = device_->allocate(4, "test");
  read(buffer, 1, *stream);
  int32_t current = -1;
  table.get_device(&current);
  EXPECT_EQ(current, 1);
  table.set_device(0);
}

TEST_F(EmulatedCuda, CpuStreamsAreRefused) {
  const auto cpu = make_cpu_device({});
  const auto stream = cpu->create_stream("test");
  EXPECT_THROW(as_cuda(*stream), NotAvailable);
  EXPECT_THROW(as_cuda(*cpu), NotAvailable);
  EXPECT_THROW(as_cpu(*device_->create_stream("test")), NotAvailable);
}

}  // namespace
}  // namespace polyreme
