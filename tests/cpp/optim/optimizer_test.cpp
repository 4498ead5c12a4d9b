// Update rules over flat buffers: whose weights decay, what stays zero, what a step counts. On the
// deferred device, where fresh memory is NaN: what should be zero must have been set.
#include "optim/optimizer.h"

#include <cstring>

#include "common/error_text.h"
#include "common/thread_ranks.h"
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
    optimizer = make_optimizer(rig.stream(), map, 0, nullptr, options);
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
  void step(double lr, float scale = 1.0f, const std::vector<uint8_t>& has_grad = {}) {
    optimizer->step(rig.stream(), {&weights, 1}, {&grads, 1},
                    {.lr = lr, .scale = rig.upload({scale}), .has_grad = has_grad});
    if (!std::isnan(scale)) optimizer->applied(has_grad);
  }
  Tensor state(const std::string& name) const {
    for (const auto& [key, on_host, slices] : optimizer->state())
      if (key == name) return slices[0];
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
      flat.step(kLr);
      for (size_t i = 0; i < 3; ++i) {
        const auto got = flat.get(flat.weights, i);
        for (size_t e = 0; e < got.size(); ++e)
          ASSERT_NEAR(static_cast<double>(got[e]), p[i][e], 2e-6 * (1 + std::abs(p[i][e])));
      }
    }
    flat.expect_zero_gaps(flat.weights, "weights");
    for (const auto& [name, on_host, slices] : flat.optimizer->state())
      flat.expect_zero_gaps(slices[0], name);
    flat.expect_zero_gaps(flat.grads, "grads");
  }
}

TEST(Optimizer, OOp01StepCounterAndBiasCorrection) {
  Flat flat(std::vector<Shape>(5, {1}), OptimizerOptions{.weight_decay = std::vector<double>(5, 0.0)});
  for (size_t i = 0; i < 5; ++i) flat.set(flat.grads, i, {1.0f});
  for (int64_t step = 1; step <= 3; ++step) {
    flat.step(0.1);
    for (size_t i = 0; i < 5; ++i)
      EXPECT_NEAR(static_cast<double>(flat.get(flat.weights, i)[0]), -0.1 * static_cast<double>(step), 1e-6);
  }
}

TEST(Optimizer, OOp02ASkippedStepChangesNothing) {
  for (const char* rule : {"adamw", "sgd"}) {
    Flat flat({{1}}, {.rule = rule, .momentum = 0.5, .weight_decay = {0.0}});
    flat.set(flat.grads, 0, {1.0f});
    flat.step(0.1);
    const auto after_first = flat.get(flat.weights, 0);
    std::vector<float> state;
    for (const auto& entry : flat.optimizer->state()) append(state, flat.rig.download(entry.slices[0]));
    flat.set(flat.grads, 0, {kInf});
    flat.step(0.1, kNan);
    expect_same_bits(flat.get(flat.weights, 0), after_first);
    std::vector<float> state_now;
    for (const auto& entry : flat.optimizer->state()) append(state_now, flat.rig.download(entry.slices[0]));
    expect_same_bits(state_now, state);
    flat.set(flat.grads, 0, {1.0f});
    flat.step(0.1);
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
      flat.step(0.1);
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
  flat.optimizer->step(flat.rig.stream(), {&flat.weights, 1}, {&flat.grads, 1}, {.lr = 0.01, .scale = scale});
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
    alone.step(0.01, 0.5f);
    expect_same_bits(flat.get(flat.weights, i), alone.get(alone.weights, 0));
    expect_same_bits(flat.get(flat.state("exp_avg"), i), alone.get(alone.state("exp_avg"), 0));
    expect_same_bits(flat.get(flat.state("exp_avg_sq"), i), alone.get(alone.state("exp_avg_sq"), 0));
  }
}

// Three steps of a rule with `num_shards` ranks; the weights, by parameter.
std::vector<float> train_shards(const OptimizerOptions& options, const std::vector<Shape>& shapes,
                                int num_shards, const UnitOptions& units) {
  std::vector<std::vector<float>> results(static_cast<size_t>(num_shards));
  run_ranks(num_shards, {.executor = CpuExecutor::kDeferred}, [&](World& world) {
    const ShardMap map = Flat::map_of(shapes, num_shards, units);
    const auto stream = world.device().create_stream("test");
    std::vector<Tensor> weights, grads;
    for (int unit = 0; unit < map.num_units(); ++unit)
      for (std::vector<Tensor>* buffers : {&weights, &grads}) {
        buffers->push_back(empty(world.device(), DType::kF32, {map.unit_elements(unit)}, "unit"));
        fill(*stream, buffers->back(), 0.0f);
      }
    const auto part = [&](const std::vector<Tensor>& buffers, int param) {
      return map.view(buffers[static_cast<size_t>(map.unit_of(param))], param);
    };
    const auto set = [&](const std::vector<Tensor>& buffers, uint32_t seed) {
      for (int i = 0; i < map.num_params(); ++i) {
        const auto values =
            random_floats(static_cast<size_t>(map.shape_of(i).numel()), seed + static_cast<uint32_t>(i));
        copy_from_host(*stream, values.data(), part(buffers, i));
        stream->synchronize();
      }
    };
    const auto slices = [&](const std::vector<Tensor>& buffers) {
      std::vector<Tensor> result;
      for (int unit = 0; unit < map.num_units(); ++unit) {
        const FlatRange slice = map.shard_slice(unit, world.rank());
        result.push_back(buffers[static_cast<size_t>(unit)].slice(0, slice.begin, slice.end));
      }
      return result;
    };
    set(weights, 10);
    const std::vector<float> half = {0.5f};
    const Tensor scale = empty(world.device(), DType::kF32, {1}, "scale");
    copy_from_host(*stream, half.data(), scale);
    const auto optimizer = make_optimizer(*stream, map, world.rank(), &world.communicator(), options);
    for (uint32_t step = 1; step <= 3; ++step) {
      set(grads, 100 * step);
      // The third parameter has no gradient in the second step.
      const std::vector<uint8_t> has_grad = {1, 1, step != 2, 1, 1};
      optimizer->step(*stream, slices(weights), slices(grads),
                      {.lr = 0.01, .scale = scale, .has_grad = has_grad});
      optimizer->applied(has_grad);
    }
    std::vector<float>& result = results[static_cast<size_t>(world.rank())];
    for (int unit = 0; unit < map.num_units(); ++unit)
      world.communicator()
          .all_gather(slices(weights)[static_cast<size_t>(unit)], weights[static_cast<size_t>(unit)], *stream)
          ->wait_on(*stream);
    for (int i = 0; i < map.num_params(); ++i) {
      std::vector<float> values(static_cast<size_t>(map.shape_of(i).numel()));
      copy_to_host(*stream, part(weights, i), values.data());
      stream->synchronize();
      append(result, values);
    }
  });
  for (const auto& result : results) expect_same_bits(result, results[0], "another rank");
  return results[0];
}

// The border of a shard may lie inside a parameter and inside a run of one decay.
TEST(Optimizer, ShardsHaveTheBitsOfTheWhole) {
  const std::vector<Shape> shapes = {{30, 50}, {7}, {3}, {4000}, {40, 70}};
  for (const char* rule : {"adamw", "sgd", "lion", "lamb", "muon"}) {
    const OptimizerOptions options{.rule = rule,
                                   .momentum = 0.9,
                                   .weight_decay = {0.1, 0.1, 0.0, 0.0, 0.1},
                                   .lr_multiplier = {1, 0.5, 1, 1, 2}};
    const std::vector<float> whole = train_shards(options, shapes, 1, {});
    for (const int64_t bucket_bytes : {int64_t{1}, int64_t{6100}, int64_t{1} << 40})
      for (const int num_shards : {1, 2, 3, 5})
        expect_same_bits(train_shards(options, shapes, num_shards, {.bucket_bytes = bucket_bytes}), whole,
                         concat(rule, ", shards: ", num_shards, ", units of ", bucket_bytes));
    const std::vector<int> groups = state_groups(Flat::specs_of(shapes), options);
    expect_same_bits(train_shards(options, shapes, 2, {.group_of_param = groups}), whole, rule);
  }
}

TEST(Optimizer, OOp03CounterPerParameter) {
  Flat flat({{1}, {1}}, {.weight_decay = {0.0, 0.0}});
  for (size_t i = 0; i < 2; ++i) flat.set(flat.grads, i, {1.0f});
  for (const bool second : {true, false, true}) flat.step(0.1, 1.0f, {1, second});
  EXPECT_NEAR(static_cast<double>(flat.get(flat.weights, 0)[0]), -0.3, 1e-6);
  EXPECT_NEAR(static_cast<double>(flat.get(flat.weights, 1)[0]), -0.2, 1e-6);
  EXPECT_EQ(flat.optimizer->updates(), (std::vector<int64_t>{3, 2}));

  Flat later({{1}, {1}}, {.weight_decay = {0.0, 0.0}});
  later.optimizer->set_updates({3, 2});
  EXPECT_EQ(later.optimizer->updates(), (std::vector<int64_t>{3, 2}));
  EXPECT_THROW_WITH(later.optimizer->set_updates({1}), InvalidArgument, "1 parameters for 2");
  EXPECT_THROW_WITH(later.optimizer->set_updates({1, -1}), InvalidArgument, "parameter 1");
}

// A parameter without gradient is left as it is in the middle of others, its moments too.
TEST(Optimizer, OUf01WithoutAGradientNothingMoves) {
  for (const char* rule : {"adamw", "sgd", "lion", "lamb", "muon"}) {
    const std::vector<Shape> shapes = {{5, 3}, {2, 4}, {5, 3}};
    Flat flat(shapes, OptimizerOptions{.rule = rule, .momentum = 0.5, .weight_decay = {0.1, 0.1, 0.1}});
    for (size_t i = 0; i < 3; ++i) {
      const auto count = static_cast<size_t>(shapes[i].numel());
      flat.set(flat.weights, i, random_floats(count, 1));
      flat.set(flat.grads, i, random_floats(count, 2));
    }
    flat.step(0.1);
    const auto everything = [&](size_t param) {
      auto values = flat.get(flat.weights, param);
      for (const auto& entry : flat.optimizer->state())
        if (entry.slices[0].defined()) append(values, flat.get(entry.slices[0], param));
      return values;
    };
    const auto middle = everything(1), first = everything(0);
    flat.step(0.1, 1.0f, {1, 0, 1});
    expect_same_bits(everything(1), middle, rule);
    EXPECT_NE(everything(0), first) << rule;
    expect_same_bits(everything(2), everything(0), rule);
  }
}

TEST(Optimizer, FrozenParametersHaveNoStateAndStay) {
  const std::vector<Shape> shapes = {{5, 3}, {4, 4}};
  const std::vector<ParamSpec> specs = Flat::specs_of(shapes);
  const OptimizerOptions options{.weight_decay = {0.1, 0.1}, .trainable = {1, 0}};
  const std::vector<int> groups = state_groups(specs, options);
  EXPECT_EQ(groups, (std::vector<int>{0, 2}));
  Rig rig({.executor = CpuExecutor::kDeferred});
  const ShardMap map(specs, make_units(specs, {}, {.group_of_param = groups}), 1);
  const auto optimizer = make_optimizer(rig.stream(), map, 0, nullptr, options);
  ASSERT_EQ(map.num_units(), 2);
  for (const OptimizerState& state : optimizer->state()) {
    EXPECT_TRUE(state.slices[0].defined());
    EXPECT_FALSE(state.slices[1].defined());
  }
  const auto filled = [&](int unit) {
    return rig.upload(random_floats(static_cast<size_t>(map.unit_elements(unit)), 1));
  };
  const std::vector<Tensor> weights = {filled(0), filled(1)}, grads = {filled(0), Tensor()};
  const auto before = rig.download(weights[1]);
  optimizer->step(rig.stream(), weights, grads, {.lr = 0.1, .scale = rig.upload({1.0f})});
  expect_same_bits(rig.download(weights[1]), before);
  EXPECT_NE(rig.download(weights[0]), before);
}

TEST(Optimizer, StateHasNamesAndStartsAtZero) {
  const auto names = [](const OptimizerOptions& options) {
    Flat flat({{3}, {2}}, options);
    std::vector<std::string> result;
    for (const auto& [name, on_host, slices] : flat.optimizer->state()) {
      result.push_back(name);
      expect_same_bits(flat.rig.download(slices[0]),
                       std::vector<float>(static_cast<size_t>(slices[0].numel()), 0.0f), name);
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
  expect_parts(text({.rule = "adagrad"}), {"'adagrad'", "adamw, sgd, lion, lamb or muon"});
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
