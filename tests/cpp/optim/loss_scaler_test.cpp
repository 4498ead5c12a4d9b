// The scale of the loss as a state machine.
#include "optim/loss_scaler.h"

#include <cmath>
#include <vector>

#include "common/error_text.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

std::vector<double> scales_after(LossScaler& scaler, const std::vector<bool>& overflows) {
  std::vector<double> scales;
  for (const bool overflowed : overflows) {
    scaler.update(overflowed);
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(LossScaler, OMp04GrowthIntervalCounting) {
  LossScaler scaler({.initial = 4, .growth = 2, .interval = 3});
  EXPECT_EQ(scales_after(scaler, {false, false, true, false, false, false, false}),
            (std::vector<double>{4, 4, 2, 2, 2, 4, 4}));

  LossScaler growing({.interval = 1});
  for (int call = 0; call < 400; ++call) {
    growing.update(false);
    ASSERT_TRUE(std::isfinite(growing.scale()));
  }
  EXPECT_EQ(growing.scale(), growing.options().maximum);
}

TEST(LossScaler, StandardParameters) {
  const LossScalerOptions options;
  EXPECT_EQ(options.initial, 65536);
  EXPECT_EQ(options.interval, 2000);
  LossScaler scaler;
  for (int call = 0; call < 2000; ++call) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 65536);
}

TEST(LossScaler, HasAFloorAndHysteresis) {
  LossScaler floor({.initial = 4, .minimum = 1});
  EXPECT_EQ(scales_after(floor, {true, true, true, true}), (std::vector<double>{2, 1, 1, 1}));

  // Two overflows are forgiven; growth forgets them.
  LossScaler patient({.initial = 8, .interval = 2, .hysteresis = 3});
  EXPECT_EQ(scales_after(patient, {true, true, false, false, true, true, true, true}),
            (std::vector<double>{8, 8, 8, 16, 16, 16, 8, 4}));
}

TEST(LossScaler, AStaticScaleStays) {
  LossScaler scaler({.dynamic = false, .initial = 1024});
  EXPECT_EQ(scales_after(scaler, {true, false, true}), (std::vector<double>{1024, 1024, 1024}));
  EXPECT_THROW_WITH(scaler.load({.scale = 512}), InvalidArgument, "a static scale of 1024");
}

TEST(LossScaler, ContinuesFromItsState) {
  const std::vector<bool> first = {false, true, false, false}, second = {false, false, true, false, false};
  const LossScalerOptions options{.initial = 1024, .interval = 3, .hysteresis = 2};
  LossScaler whole(options), before(options), after(options);
  scales_after(whole, first);
  scales_after(before, first);
  after.load(before.state());
  EXPECT_EQ(scales_after(after, second), scales_after(whole, second));
}

TEST(LossScaler, RefusesConstantsOutOfRange) {
  const auto make = [](const LossScalerOptions& options) { const LossScaler scaler(options); };
  EXPECT_THROW_WITH(make({.initial = 0}), InvalidArgument, "initial=0");
  EXPECT_THROW_WITH(make({.growth = 0.5}), InvalidArgument, "growth=0.5");
  EXPECT_THROW_WITH(make({.backoff = 0}), InvalidArgument, "backoff=0");
  EXPECT_THROW_WITH(make({.interval = 0}), InvalidArgument, "interval=0");
  EXPECT_THROW_WITH(make({.minimum = 100000}), InvalidArgument, "minimum=100000");
  EXPECT_THROW_WITH(make({.hysteresis = 0}), InvalidArgument, "hysteresis=0");
  LossScaler scaler;
  EXPECT_THROW_WITH(scaler.load({.scale = 0.5}), InvalidArgument, "a saved scale of 0.5");
}

}  // namespace
}  // namespace polyreme::testing
