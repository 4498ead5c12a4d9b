#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace polyreme {

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  const LossScalerOptions& o = options;
  require(o.initial > 0 && std::isfinite(o.initial), "LossScaler: initial=", o.initial,
          "; expected a finite number above 0");
  state_ = {.scale = o.initial, .good_steps = 0, .hysteresis_left = o.hysteresis};
  if (!o.dynamic) return;
  require(o.growth >= 1 && std::isfinite(o.growth), "LossScaler: growth=", o.growth,
          "; expected a finite number, 1 or more");
  require(o.backoff > 0 && o.backoff <= 1, "LossScaler: backoff=", o.backoff, "; expected 0 < backoff <= 1");
  require(o.interval >= 1, "LossScaler: interval=", o.interval, "; expected at least 1 step");
  require(o.hysteresis >= 1, "LossScaler: hysteresis=", o.hysteresis, "; expected at least 1 overflow");
  require(o.minimum > 0 && o.minimum <= o.initial && o.initial <= o.maximum && std::isfinite(o.maximum),
          "LossScaler: minimum=", o.minimum, ", initial=", o.initial, ", maximum=", o.maximum,
          "; expected 0 < minimum <= initial <= maximum, all finite");
}

void LossScaler::update(bool overflowed) {
  if (!options_.dynamic) return;
  if (overflowed) {
    state_.good_steps = 0;
    state_.hysteresis_left = std::max<int64_t>(0, state_.hysteresis_left - 1);
    if (state_.hysteresis_left == 0)
      state_.scale = std::max(options_.minimum, state_.scale * options_.backoff);
  } else if (++state_.good_steps >= options_.interval) {
    state_ = {.scale = std::min(options_.maximum, state_.scale * options_.growth),
              .good_steps = 0,
              .hysteresis_left = options_.hysteresis};
  }
}

void LossScaler::load(const LossScalerState& state) {
  const bool in_range = options_.dynamic ? state.scale >= options_.minimum && state.scale <= options_.maximum
                                         : state.scale == options_.initial;
  require(in_range, "LossScaler: a saved scale of ", state.scale, " does not fit ",
          options_.dynamic ? concat("[", options_.minimum, ", ", options_.maximum, "]")
                           : concat("a static scale of ", options_.initial),
          "; make the scaler with the constants of the run that was saved");
  require(state.good_steps >= 0 && state.hysteresis_left >= 0, "LossScaler: a saved state counts ",
          state.good_steps, " good steps and ", state.hysteresis_left, " overflows; expected 0 or more");
  state_ = state;
}

}  // namespace polyreme
