// Update rules over flat buffers: whose weights decay, what stays zero, what a step counts. On the
// deferred device, where fresh memory is NaN: what should be zero must have been set.
#include "optim/optimizer.h"

#include <cstring>

#include "common/error_text.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

// Parameters of given shapes in flat buffers with an optimizer.
struct Flat {
  Rig rig{CpuDeviceOptions{.executor = CpuExecutor::kDeferred}};
  ShardMap map;
  Tensor weights, grads;
  std::unique_ptr<Optimizer> optimizer;

  Flat(const std::vector<Shape>& shapes, const OptimizerOptions& options) : map(map_of(shapes, 1)) {
    weights = rig.empty_f32({map.num_elements()});
    grads = rig.empty_f32({map.num_elements()});
    fill(rig.stream(), weights, 0.0f);
    fill(rig.stream(), grads, 0.0f);
    optimizer = make_optimizer(rig.stream(), map, 0, options);
  }

  // All parameters in one unit, unless a unit is to end after `bucket_bytes`.
  static ShardMap map_of(const std::vector<Shape>& shapes, int64_t num_shards,
                         const UnitOptions& options = {}) {
    const std::vector<ParamSpec> specs = specs_of(shapes);
    return {specs, make_units(specs, {}, options), num_shards};
  }

  static std::vector<ParamSpec> specs_of(const std::vector<Shape>& shapes) {
    std::vector<ParamSpec> specs;
    for (const Shape& shape : shapes)
      specs.push_back({.name = concat("p", specs.size()), .shape = shape, .padded_shape = shape});
    return specs;
  }
  void set(const Tensor& flat, size_t param, const std::vector<float>& values) {
    copy_from_host(rig.stream(), values.data(), map.view(flat, static_cast<int>(param)));
    rig.synchronize();
  }
  std::vector<float> get(const Tensor& flat, size_t param) {
    return rig.download(map.view(flat, static_cast<int>(param)));
  }
  void step(double lr, int64_t number, float scale = 1.0f) {
    optimizer->step(rig.stream(), {&weights, 1}, {&grads, 1}, rig.upload({scale}), lr, number);
  }
  Tensor state(const std::string& name) const {
    for (const auto& [key, tensor] : optimizer->state())
      if (key == name) return tensor;
    throw InvalidArgument("no state " + name);
  }
  // Every element outside the parameters has the bits of +0.
  void expect_zero_gaps(const Tensor& flat, const std::string& what) {
    const std::vector<float> values = rig.download(flat);
    int64_t begin = 0;
    for (int i = 0; i <= map.num_params(); ++i) {
      const int64_t end = i < map.num_params() ? map.offset_in_unit(i) : map.num_elements();
      for (int64_t e = begin; e < end; ++e)
        ASSERT_EQ(bits_of(values[static_cast<size_t>(e)]), 0u) << what << " element " << e;
      if (i < map.num_params()) begin = end + map.shape_of(i).numel();
    }
  }
};

TEST(Optimizer, OCl07PaddingNeverReachesNormOrMoments) {
  const std::vector<Shape> shapes = {{3}, {5}, {1}};
  constexpr double kLr = 0.25, kDecay = 0.125, kEps = 1.0 / 1024, kBeta1 = 0.875, kBeta2 = 0.96875;
  for (const char* rule : {"adamw", "sgd"}) {
    const bool adamw = std::string(rule) == "adamw";
    Flat flat(shapes, OptimizerOptions{.rule = rule,
                                       .beta1 = kBeta1,
                                       .beta2 = kBeta2,
                                       .eps = kEps,
                                       .momentum = 0.875,
                                       .weight_decay = std::vector<double>(3, kDecay)});
    std::vector<std::vector<double>> p, m(3), v(3);
    for (size_t i = 0; i < 3; ++i) {
      const auto start = random_floats(static_cast<size_t>(shapes[i].numel()), static_cast<uint32_t>(i));
      flat.set(flat.weights, i, start);
      p.emplace_back(start.begin(), start.end());
      m[i].assign(start.size(), 0.0);
      v[i].assign(start.size(), 0.0);
    }
    for (int64_t step = 1; step <= 10; ++step) {
      double squares = 0;
      for (size_t i = 0; i < 3; ++i) {
        const auto grad =
            random_floats(p[i].size(), static_cast<uint32_t>(10 * static_cast<size_t>(step) + i));
        flat.set(flat.grads, i, grad);
        for (size_t e = 0; e < grad.size(); ++e) {
          const double g = grad[e];
          squares += g * g;
          if (adamw) {
            m[i][e] = kBeta1 * m[i][e] + (1 - kBeta1) * g;
            v[i][e] = kBeta2 * v[i][e] + (1 - kBeta2) * g * g;
            const double m_hat = m[i][e] / (1 - std::pow(kBeta1, step));
            const double v_hat = v[i][e] / (1 - std::pow(kBeta2, step));
            p[i][e] -= kLr * (m_hat / (std::sqrt(v_hat) + kEps) + kDecay * p[i][e]);
          } else {
            m[i][e] = 0.875 * m[i][e] + g;
            p[i][e] -= kLr * (m[i][e] + kDecay * p[i][e]);
          }
        }
      }
      // The whole buffer, gaps included, has the norm of the parameters.
      const Tensor limbs = empty(flat.rig.device(), DType::kI64, {ExactSum::kLimbs}, "limbs");
      zero_limbs(flat.rig.stream(), limbs);
      exact_sum_squares(flat.rig.stream(), flat.grads, limbs);
      ExactSum::Limbs host;
      const auto downloaded = flat.rig.download<int64_t>(limbs);
      std::copy(downloaded.begin(), downloaded.end(), host.begin());
      EXPECT_NEAR(ExactSum(host).value(), squares, 1e-13 * squares);
      flat.step(kLr, step);
      for (size_t i = 0; i < 3; ++i) {
        const auto got = flat.get(flat.weights, i);
        for (size_t e = 0; e < got.size(); ++e)
          ASSERT_NEAR(static_cast<double>(got[e]), p[i][e], 2e-6 * (1 + std::abs(p[i][e])));
      }
    }
    flat.expect_zero_gaps(flat.weights, "weights");
    for (const auto& [name, tensor] : flat.optimizer->state()) flat.expect_zero_gaps(tensor, name);
    flat.expect_zero_gaps(flat.grads, "grads");
  }
}

TEST(Optimizer, OOp01StepCounterAndBiasCorrection) {
  Flat flat(std::vector<Shape>(5, {1}), OptimizerOptions{.weight_decay = std::vector<double>(5, 0.0)});
  for (size_t i = 0; i < 5; ++i) flat.set(flat.grads, i, {1.0f});
  for (int64_t step = 1; step <= 3; ++step) {
    flat.step(0.1, step);
    for (size_t i = 0; i < 5; ++i)
      EXPECT_NEAR(static_cast<double>(flat.get(flat.weights, i)[0]), -0.1 * static_cast<double>(step), 1e-6);
  }
}

TEST(Optimizer, OOp02ASkippedStepChangesNothing) {
  for (const char* rule : {"adamw", "sgd"}) {
    Flat flat({{1}}, {.rule = rule, .momentum = 0.5, .weight_decay = {0.0}});
    flat.set(flat.grads, 0, {1.0f});
    flat.step(0.1, 1);
    const auto after_first = flat.get(flat.weights, 0);
    std::vector<float> state;
    for (const auto& entry : flat.optimizer->state()) append(state, flat.rig.download(entry.second));
    flat.set(flat.grads, 0, {kInf});
    flat.step(0.1, 2, kNan);
    expect_same_bits(flat.get(flat.weights, 0), after_first);
    std::vector<float> state_now;
    for (const auto& entry : flat.optimizer->state()) append(state_now, flat.rig.download(entry.second));
    expect_same_bits(state_now, state);
    flat.set(flat.grads, 0, {1.0f});
    flat.step(0.1, 2);
    // AdamW: -0.1 twice. SGD: -0.1, then momentum makes the step 1.5 times as long.
    EXPECT_NEAR(static_cast<double>(flat.get(flat.weights, 0)[0]),
                std::string(rule) == "adamw" ? -0.2 : -0.25, 1e-6);
  }
}

TEST(Optimizer, OOp04DecayGroupsUnderFlatBuffers) {
  for (const char* rule : {"adamw", "sgd"}) {
    // Weight, bias, norm, in every order of the three.
    for (size_t weight = 0; weight < 3; ++weight) {
      std::vector<Shape> shapes(3, {3});
      std::vector<double> decay(3, 0.0);
      shapes[weight] = {3, 3};
      decay[weight] = 0.1;
      Flat flat(shapes, OptimizerOptions{.rule = rule, .weight_decay = decay});
      for (size_t i = 0; i < 3; ++i)
        flat.set(flat.weights, i, std::vector<float>(static_cast<size_t>(shapes[i].numel()), 1.0f));
      flat.step(0.1, 1);
      for (size_t i = 0; i < 3; ++i)
        for (const float value : flat.get(flat.weights, i)) {
          if (i == weight)
            EXPECT_FLOAT_EQ(value, 0.99f);
          else
            EXPECT_EQ(value, 1.0f);
        }
    }
  }
}

// Neighbours with one decay are one launch, and grouping changes no bit.
TEST(Optimizer, RunsOfOneDecayAreOneLaunch) {
  const std::vector<Shape> shapes = {{4, 5}, {7}, {3}, {33}, {2, 2}};
  const std::vector<double> decay = {0.1, 0.1, 0.0, 0.0, 0.1};
  Flat flat(shapes, OptimizerOptions{.weight_decay = decay});
  const auto value = [](size_t i, uint32_t what, const Shape& shape) {
    return random_floats(static_cast<size_t>(shape.numel()), 10 * what + static_cast<uint32_t>(i));
  };
  for (size_t i = 0; i < shapes.size(); ++i) {
    flat.set(flat.weights, i, value(i, 1, shapes[i]));
    flat.set(flat.grads, i, value(i, 2, shapes[i]));
  }
  const Tensor scale = flat.rig.upload({0.5f});
  flat.rig.device().recorder().enable(true);
  flat.optimizer->step(flat.rig.stream(), {&flat.weights, 1}, {&flat.grads, 1}, scale, 0.01, 1);
  flat.rig.synchronize();
  flat.rig.device().recorder().enable(false);
  int launches = 0;
  for (const Span& span : flat.rig.device().recorder().spans())
    launches += std::strcmp(span.name, "adamw") == 0;
  EXPECT_EQ(launches, 3);
  for (size_t i = 0; i < shapes.size(); ++i) {
    Flat alone({shapes[i]}, {.weight_decay = {decay[i]}});
    alone.set(alone.weights, 0, value(i, 1, shapes[i]));
    alone.set(alone.grads, 0, value(i, 2, shapes[i]));
    alone.step(0.01, 1, 0.5f);
    expect_same_bits(flat.get(flat.weights, i), alone.get(alone.weights, 0));
    expect_same_bits(flat.get(flat.state("exp_avg"), i), alone.get(alone.state("exp_avg"), 0));
    expect_same_bits(flat.get(flat.state("exp_avg_sq"), i), alone.get(alone.state("exp_avg_sq"), 0));
  }
}

// Every shard has an optimizer of its own, whose border may lie inside a parameter and inside a run of
// one decay.
TEST(Optimizer, ShardsHaveTheBitsOfTheWhole) {
  const std::vector<Shape> shapes = {{30, 50}, {7}, {3}, {4000}, {2, 2}};
  for (const char* rule : {"adamw", "sgd"}) {
    const OptimizerOptions options{.rule = rule, .momentum = 0.9, .weight_decay = {0.1, 0.1, 0.0, 0.0, 0.1}};
    // The weights after three steps, by parameter.
    const auto train = [&](int64_t num_shards, int64_t bucket_bytes) {
      Rig rig({.executor = CpuExecutor::kDeferred});
      const ShardMap map = Flat::map_of(shapes, num_shards, {.bucket_bytes = bucket_bytes});
      std::vector<Tensor> weights, grads;
      for (int unit = 0; unit < map.num_units(); ++unit)
        for (std::vector<Tensor>* buffers : {&weights, &grads}) {
          buffers->push_back(rig.empty_f32({map.unit_elements(unit)}));
          fill(rig.stream(), buffers->back(), 0.0f);
        }
      const auto part = [&](const std::vector<Tensor>& buffers, int param) {
        return map.view(buffers[static_cast<size_t>(map.unit_of(param))], param);
      };
      const auto set = [&](const std::vector<Tensor>& buffers, uint32_t seed) {
        for (int i = 0; i < map.num_params(); ++i) {
          const auto values =
              random_floats(static_cast<size_t>(map.shape_of(i).numel()), seed + static_cast<uint32_t>(i));
          copy_from_host(rig.stream(), values.data(), part(buffers, i));
          rig.synchronize();
        }
      };
      const auto slices = [&](const std::vector<Tensor>& buffers, int64_t shard) {
        std::vector<Tensor> result;
        for (int unit = 0; unit < map.num_units(); ++unit) {
          const FlatRange slice = map.shard_slice(unit, shard);
          result.push_back(buffers[static_cast<size_t>(unit)].slice(0, slice.begin, slice.end));
        }
        return result;
      };
      set(weights, 10);
      const Tensor scale = rig.upload({0.5f});
      std::vector<std::unique_ptr<Optimizer>> optimizers;
      for (int64_t shard = 0; shard < num_shards; ++shard)
        optimizers.push_back(make_optimizer(rig.stream(), map, shard, options));
      for (int64_t step = 1; step <= 3; ++step) {
        set(grads, static_cast<uint32_t>(100 * step));
        for (int64_t shard = 0; shard < num_shards; ++shard)
          optimizers[static_cast<size_t>(shard)]->step(rig.stream(), slices(weights, shard),
                                                       slices(grads, shard), scale, 0.01, step);
      }
      std::vector<float> result;
      for (int i = 0; i < map.num_params(); ++i) append(result, rig.download(part(weights, i)));
      return result;
    };
    const std::vector<float> whole = train(1, int64_t{1} << 40);
    for (const int64_t bucket_bytes : {int64_t{1}, int64_t{6100}, int64_t{1} << 40})
      for (const int64_t num_shards : {1, 2, 3, 5, 16})
        expect_same_bits(train(num_shards, bucket_bytes), whole,
                         concat(rule, ", shards: ", num_shards, ", units of ", bucket_bytes));
  }
}

TEST(Optimizer, StateHasNamesAndStartsAtZero) {
  const auto names = [](const OptimizerOptions& options) {
    Flat flat({{3}, {2}}, options);
    std::vector<std::string> result;
    for (const auto& [name, tensor] : flat.optimizer->state()) {
      result.push_back(name);
      expect_same_bits(flat.rig.download(tensor),
                       std::vector<float>(static_cast<size_t>(tensor.numel()), 0.0f), name);
    }
    return result;
  };
  const std::vector<double> decay(2, 0.0);
  EXPECT_EQ(names(OptimizerOptions{.weight_decay = decay}),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(names(OptimizerOptions{.rule = "sgd", .momentum = 0.9, .weight_decay = decay}),
            (std::vector<std::string>{"momentum"}));
  EXPECT_EQ(names(OptimizerOptions{.rule = "sgd", .weight_decay = decay}), (std::vector<std::string>{}));
}

TEST(Optimizer, RefusesConstantsOutOfRange) {
  const auto text = [](OptimizerOptions options) {
    if (options.weight_decay.empty()) options.weight_decay = {0.0};
    return error_text<InvalidArgument>([&] { Flat({{3}}, options); });
  };
  expect_parts(text({.rule = "lion"}), {"'lion'", "adamw or sgd"});
  expect_parts(text({.weight_decay = {0.0, 0.0}}), {"2 entries for 1"});
  expect_parts(text({.weight_decay = {-0.5}}), {"parameter 0 is -0.5"});
  expect_parts(text({.weight_decay = {kNan}}), {"parameter 0 is nan"});
  expect_parts(text({.weight_decay = {kInf}}), {"parameter 0 is inf", "finite"});
  expect_parts(text({.beta1 = 1.0}), {"betas (1,", "0 <= beta < 1"});
  expect_parts(text({.beta2 = -0.5}), {", -0.5)"});
  expect_parts(text({.eps = 0.0}), {"eps=0"});
  expect_parts(text({.eps = 1e-50}), {"eps=1e-50", "fp32"});
  expect_parts(text({.eps = kInf}), {"eps=inf"});
  expect_parts(text({.rule = "sgd", .momentum = 1.0}), {"momentum=1"});
  expect_parts(text({.rule = "sgd", .momentum = kNan}), {"momentum=nan"});
}

}  // namespace
}  // namespace polyreme::testing
