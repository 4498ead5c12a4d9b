#pragma once

#include <cstdint>

namespace polyreme {

// How a loss is scaled, so that small gradients do not vanish in 16 bits (Micikevicius et al. 2018).
struct LossScalerOptions {
  bool dynamic = true;  // false: `initial` for ever
  double initial = 65536;
  double growth = 2;     // factor after `interval` steps in a row without an overflow
  double backoff = 0.5;  // factor at an overflow
  int64_t interval = 2000;
  double minimum = 1;
  double maximum = 16777216;  // 2^24
  // How many overflows there must have been since the scale last grew before it backs off: with 1 every one
  // does.
  int64_t hysteresis = 1;
};

// What must be kept to go on as if nothing had happened.
struct LossScalerState {
  double scale = 0;
  int64_t good_steps = 0;       // in a row, since the last overflow or growth
  int64_t hysteresis_left = 0;  // overflows until the scale backs off
};

// The scale of the loss over the steps of a run: a pure state machine on the host. All ranks make the same
// calls with the same flags and so have the same scale.
class LossScaler {
 public:
  // Throws InvalidArgument for constants out of range.
  explicit LossScaler(const LossScalerOptions& options = {});

  // The factor of the loss, and so of all gradients, until the next update.
  double scale() const { return state_.scale; }
  // Once per step, after it: whether a gradient of any rank was not finite (then the step was skipped).
  void update(bool overflowed);

  const LossScalerOptions& options() const { return options_; }
  const LossScalerState& state() const { return state_; }
  // Throws InvalidArgument for a state that this scaler cannot have.
  void load(const LossScalerState& state);

 private:
  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace polyreme
