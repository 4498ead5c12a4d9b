#include "device/cuda_loader.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/build_info.h"

namespace polyreme {
namespace {

std::filesystem::path scratch_file(const std::string& name) {
  return std::filesystem::temp_directory_path() / (std::to_string(getpid()) + "_" + name);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CudaLoader, LooksBesideTheProgram) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  EXPECT_EQ(cuda_library_path(), (program.parent_path() / "libpolyreme_cuda.so").string());
}

TEST(CudaLoader, WithoutTheLibrarySaysNotBuilt) {
  const std::string path = scratch_file("absent.so").string();
  const CudaProbe probe = probe_cuda(path);
  EXPECT_FALSE(probe.built);
  EXPECT_FALSE(probe.loaded);
  EXPECT_TRUE(probe.devices.empty());
  EXPECT_EQ(probe.library, path);
  EXPECT_TRUE(contains(probe.message, "not part of this build")) << probe.message;
  EXPECT_TRUE(contains(probe.message, path)) << probe.message;
  EXPECT_TRUE(contains(probe.message, "install the CUDA toolkit and build polyreme again")) << probe.message;
}

TEST(CudaLoader, AFileThatIsNoLibraryIsExplained) {
  const std::filesystem::path path = scratch_file("broken.so");
  std::ofstream(path) << "not an ELF file";
  const CudaProbe probe = probe_cuda(path.string());
  std::filesystem::remove(path);
  EXPECT_TRUE(probe.built);
  EXPECT_FALSE(probe.loaded);
  EXPECT_TRUE(contains(probe.message, "could not be loaded")) << probe.message;
}

TEST(CudaLoader, ALibraryWithoutTheTableIsExplained) {
  // Any shared object will do; this one is in every process.
  const CudaProbe probe = probe_cuda("/lib/x86_64-linux-gnu/libc.so.6");
  if (!probe.built) GTEST_SKIP() << "no libc.so.6 where Debian has it";
  EXPECT_FALSE(probe.loaded);
  EXPECT_TRUE(contains(probe.message, "is not polyreme's CUDA backend")) << probe.message;
}

class BuiltCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (build_info().cuda_version.empty()) GTEST_SKIP() << "CUDA backend: " << build_info().cuda_absent;
  }
};

TEST_F(BuiltCuda, LoadsAndKnowsItsVersion) {
  const CudaProbe probe = probe_cuda();
  EXPECT_TRUE(probe.built) << probe.library;
  ASSERT_TRUE(probe.loaded) << probe.message;
  // "13.0.88" of the compiler against 13000 of the runtime.
  const std::string& compiler = build_info().cuda_version;
  const size_t dot = compiler.find('.');
  const int expected = 1000 * std::stoi(compiler) + 10 * std::stoi(compiler.substr(dot + 1));
  EXPECT_EQ(probe.runtime_version, expected);
}

TEST_F(BuiltCuda, WithoutADriverSaysSo) {
  const CudaProbe probe = probe_cuda();
  ASSERT_TRUE(probe.loaded) << probe.message;
  if (probe.driver_version != 0) GTEST_SKIP() << "this machine has an NVIDIA driver";
  EXPECT_TRUE(probe.devices.empty());
  EXPECT_TRUE(contains(probe.message, "no NVIDIA driver was found; install one that supports CUDA"))
      << probe.message;
  EXPECT_TRUE(contains(probe.message, "cudaErrorInsufficientDriver (35)")) << probe.message;
}

TEST_F(BuiltCuda, EveryGpuRunsATestKernel) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.message;
  for (const GpuInfo& gpu : probe.devices) {
    EXPECT_EQ(gpu.problem, "") << gpu.name;
    EXPECT_FALSE(gpu.name.empty());
    EXPECT_GT(gpu.compute_major, 0);
    EXPECT_GT(gpu.multiprocessors, 0);
    EXPECT_GT(gpu.total_memory_bytes, 0u);
  }
}

}  // namespace
}  // namespace polyreme
