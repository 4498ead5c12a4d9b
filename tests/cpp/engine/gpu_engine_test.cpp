// Training steps of the engine on GPUs: the bits are the CPU's at avx2. The GPUs are emulated, and so is the
// NCCL between them (tests/emulator/fake_gpu.h says what that cannot show); compiled with POLYREME_ON_GPU,
// the tests that need one GPU run on a real one (scripts/gpu_check.sh).
#include <thread>

#include "comm/factory.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"
#include "engine/engine_rig.h"
#include "nn/llama.h"
#include "pipeline/schedule/generators.h"

#ifdef POLYREME_ON_GPU

#include "device/cuda_loader.h"

namespace polyreme::testing {

inline const PolyremeCudaTable& cuda_table() { return load_cuda(); }
inline void start_case(int, uint64_t) {}
inline std::vector<std::string> violations() { return {}; }

}  // namespace polyreme::testing

#else

#include "comm/memory_store.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_table.h"
#include "emulator/fake_gpu.h"

extern "C" const PolyremeCudaTable* polyreme_cuda_table();
extern "C" const PolyremeNcclTable* polyreme_nccl_table();

namespace polyreme::testing {

inline const PolyremeCudaTable& cuda_table() { return *polyreme_cuda_table(); }
inline void start_case(int num_gpus, uint64_t seed) { fake_gpu::reset(num_gpus, seed); }
inline std::vector<std::string> violations() { return fake_gpu::violations(); }

}  // namespace polyreme::testing

#endif

namespace polyreme::testing {
namespace {

struct Case {
  ModelConfig model = tiny_config();
  EngineOptions options = tiny_options(2, 2);
  int dp = 1, pp = 1, tp = 1;
  int lanes_tp = 1;
  int steps = 2;
  int size() const { return dp * pp * tp; }
};

// What must have the same bits everywhere.
struct Trace {
  std::vector<double> losses, norms;
  std::vector<float> weights, moments;
  bool operator==(const Trace&) const = default;
};

// One rank of a case, on any device.
Trace train(Device& device, Communicator& world, const Case& c) {
  Mesh mesh(world, MeshLayout({{"pp", c.pp}, {"dp", c.dp}, {"tp", c.tp}}, c.size()));
  Model model = build_model(c.model, {c.lanes_tp, c.tp});
  EngineOptions options = c.options;
  options.optimizer.weight_decay.assign(model.registry.specs().size(), 0.1);
  if (c.pp > 1)
    options.pipeline.schedule =
        pipeline::generate({.kind = pipeline::ScheduleKind::kOneForwardOneBackward,
                            .stages = c.pp,
                            .micro_batches = static_cast<int>(kBatch / c.dp / options.micro_batch)});
  Engine engine(device, mesh, std::move(model), options);
  const int64_t local = engine.local_batch(), first = mesh.coordinate("dp") * local;
  Trace trace;
  for (int step = 0; step < c.steps; ++step) {
    const StepStats stats =
        engine.train_step(part_of(tiny_batch(static_cast<uint32_t>(step)), first, first + local), kLr);
    trace.losses.push_back(stats.loss);
    trace.norms.push_back(stats.grad_norm);
  }
  engine.check_replicas();
  for (const ParamSpec& spec : engine.model().registry.specs()) {
    append(trace.weights, engine.read_param(spec.name, "weight"));
    append(trace.moments, engine.read_param(spec.name, "exp_avg"));
  }
  return trace;
}

// The case on one CPU.
Trace on_cpu(Case c) {
  c.dp = c.pp = c.tp = 1;
  c.options.zero = {.round_first = c.options.zero.round_first};
  const auto device = make_cpu_device({.num_threads = 1, .isa = "avx2"});
  return train(*device, *make_local_communicators(1, {}).front(), c);
}

using MakeCommunicator = std::function<std::unique_ptr<Communicator>(int rank, CudaDevice& device)>;

// The case on GPUs, a thread for each rank. Every rank's trace must be the same.
Trace on_gpus(const Case& c, uint64_t seed, const MakeCommunicator& make, bool one_gpu = false) {
  start_case(one_gpu ? 1 : c.size(), seed);
  std::vector<Trace> traces(static_cast<size_t>(c.size()));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < c.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto device = make_cuda_device(cuda_table(), one_gpu ? 0 : rank);
        const auto world = make(rank, *device);
        traces[static_cast<size_t>(rank)] = train(*device, *world, c);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& violation : violations()) ADD_FAILURE() << violation;
  for (const Trace& trace : traces) EXPECT_EQ(trace, traces[0]) << "another rank";
  return traces[0];
}

Case with_zero(int stage, int dp, int pp = 1) {
  Case c{.dp = dp, .pp = pp};
  c.options.zero.stage = stage;
  return c;
}

Case llama(DType dtype) {
  return {.model = LlamaConfig{.layers = 2,
                               .hidden = 8,
                               .heads = 4,
                               .kv_heads = 2,
                               .mlp_hidden = 12,
                               .vocab = kVocab,
                               .seq_len = kSeq,
                               .init_std = 0.3,
                               .dtype = dtype,
                               .norm_dtype = DType::kF32,
                               .logits_dtype = DType::kF32}};
}

void expect_bits(const Trace& got, const Trace& wanted, const std::string& what) {
  EXPECT_EQ(got.losses, wanted.losses) << what;
  EXPECT_EQ(got.norms, wanted.norms) << what;
  expect_same_bits(got.weights, wanted.weights, what + ": weights");
  expect_same_bits(got.moments, wanted.moments, what + ": moments");
}

// ---- one GPU
// -----------------------------------------------------------------------------------------------

// Over a transport of the CPU, with all ranks on one GPU, which NCCL refuses.
Trace on_one_gpu(const Case& c) {
  auto communicators = make_local_communicators(c.size(), {.timeout = std::chrono::seconds(120)});
  return on_gpus(
      c, 1, [&](int rank, CudaDevice&) { return std::move(communicators[static_cast<size_t>(rank)]); },
      /*one_gpu=*/true);
}

TEST(GpuEngine, OneGpu) { expect_bits(on_one_gpu({}), on_cpu({}), "GPT"); }
TEST(GpuEngine, LlamaInAnyDType) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    expect_bits(on_one_gpu(llama(dtype)), on_cpu(llama(dtype)), concat("Llama, ", dtype_name(dtype)));
}
TEST(GpuEngine, RanksThatShareAGpu) {
  const Case c = with_zero(3, 2);
  expect_bits(on_one_gpu(c), on_cpu(c), "dp=2, zero=3");
}

#ifndef POLYREME_ON_GPU

// ---- a GPU for each rank
// -----------------------------------------------------------------------------------

Trace over_nccl(const Case& c, uint64_t seed) {
  MemoryStore store;
  return on_gpus(c, seed, [&](int rank, CudaDevice& device) {
    return make_nccl_communicator(*polyreme_nccl_table(), store, rank, c.size(), device,
                                  {.timeout = std::chrono::seconds(120)});
  });
}

void expect_cpu_bits(const Case& c, const std::string& what, uint64_t seed = 1) {
  const Trace wanted = on_cpu(c), got = over_nccl(c, seed);
  expect_bits(got, wanted, what);
}

TEST(EmulatedEngine, DataParallelRanksHaveTheBitsOfOneCpu) {
  for (const uint64_t seed : {1, 2}) expect_cpu_bits(with_zero(0, 2), "dp=2", seed);
}
TEST(EmulatedEngine, EveryZeroStage) {
  for (const int stage : {1, 2, 3}) expect_cpu_bits(with_zero(stage, 2), concat("zero=", stage));
}
TEST(EmulatedEngine, APipeline) { expect_cpu_bits(with_zero(0, 1, 2), "pp=2"); }
TEST(EmulatedEngine, APipelineOfShards) { expect_cpu_bits(with_zero(3, 2, 2), "dp=2, pp=2, zero=3"); }
TEST(EmulatedEngine, TensorParallelRanks) {
  for (const int tp : {1, 2}) {
    Case c{.tp = tp, .lanes_tp = 2};
    expect_cpu_bits(c, concat("tp=", tp));
  }
  Case c = llama(DType::kBF16);
  c.dp = c.tp = c.lanes_tp = 2;
  c.options.zero.stage = 3;
  expect_cpu_bits(c, "Llama, dp=2, tp=2, zero=3, bf16");
}
TEST(EmulatedEngine, LlamaInShards) {
  Case c = llama(DType::kBF16);
  c.dp = 2;
  c.options.zero.stage = 1;
  expect_cpu_bits(c, "Llama, bf16");
}

// What every rank of dp=2 ends with, "ok" if with nothing, where `spoil(rank)` comes before the step.
std::vector<std::string> outcomes_of(const std::function<void(int rank)>& spoil) {
  start_case(2, 1);
  MemoryStore store;
  std::vector<std::string> outcomes(2, "ok");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const auto device = make_cuda_device(cuda_table(), rank);
        const auto world = make_nccl_communicator(*polyreme_nccl_table(), store, rank, 2, *device,
                                                  {.timeout = std::chrono::seconds(120)});
        Mesh mesh(*world, MeshLayout({{"dp", 2}}, 2));
        Model model = build_gpt(tiny_config());
        EngineOptions options = tiny_options(2, 2);
        options.zero.stage = 3;
        options.optimizer.weight_decay.assign(model.registry.specs().size(), 0.1);
        Engine engine(*device, mesh, std::move(model), options);
        spoil(rank);
        engine.train_step(part_of(tiny_batch(0), 4 * rank, 4 * rank + 4), kLr);
      } catch (const OutOfMemory& error) {
        outcomes[static_cast<size_t>(rank)] = concat("OutOfMemory: ", error.what());
      } catch (const DeviceError& error) {
        outcomes[static_cast<size_t>(rank)] = concat("DeviceError: ", error.what());
      } catch (const PeerLost& error) {
        outcomes[static_cast<size_t>(rank)] = concat("PeerLost: ", error.what());
      } catch (const std::exception& error) {
        outcomes[static_cast<size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& violation : violations()) ADD_FAILURE() << violation;
  return outcomes;
}

TEST(EmulatedEngine, G1AnIllegalAddressEndsBothRanks) {
  const auto outcomes = outcomes_of([](int rank) {
    if (rank == 1) fake_gpu::break_gpu(1);
  });
  expect_parts(outcomes[0], {"PeerLost", "rank 1"});
  expect_parts(outcomes[1], {"DeviceError", "cuda:1", "cudaErrorIllegalAddress"});
}

// Told as a lost rank at once, not by a timeout.
TEST(EmulatedEngine, G3OutOfMemoryOnOneRank) {
  const auto outcomes = outcomes_of([](int rank) {
    if (rank == 1) fake_gpu::take_memory();
  });
  int out = 0;
  for (const std::string& outcome : outcomes) {
    EXPECT_TRUE(outcome.starts_with("OutOfMemory: ") || outcome.starts_with("PeerLost: ")) << outcome;
    out += outcome.starts_with("OutOfMemory: ");
  }
  EXPECT_GE(out, 1);
}

#endif

}  // namespace
}  // namespace polyreme::testing
