#pragma once

#include <memory>
#include <vector>

#include "mesh/tensor_parallel.h"
#include "nn/param_registry.h"
#include "tensor/tensor.h"

namespace polyreme {

// Some samples of a lane, in order. tokens, targets: int32 [num_samples, seq_len].
struct MicroBatch {
  Tensor tokens;
  Tensor targets;            // undefined for inference
  int64_t first_sample = 0;  // position of the first sample in the global batch

  int64_t num_samples() const { return tokens.size(0); }
  int64_t seq_len() const { return tokens.size(1); }
};

// Where the weights and gradients of a rank live.
class ParamStorage {
 public:
  virtual ~ParamStorage() = default;
  virtual Tensor weight(const ParamUse& use) const = 0;
  // The accumulator of this use for the current lane; backward_weight adds to it.
  virtual Tensor grad(const ParamUse& use) const = 0;
  // The same for an operation that can write all of it. `adds`: whether there is something to add to; if not,
  // the memory is undefined, and must get the bits that adding to zeros has.
  virtual Tensor grad_to_write(const ParamUse& use, bool* adds) const {
    *adds = true;
    return grad(use);
  }
  // Whether the parameter learns. Of one that does not, what is added to grad() is dropped.
  virtual bool is_trainable(const ParamUse&) const { return true; }
};

// What a layer needs besides its input.
struct Context {
  Stream& stream;
  const ParamStorage& params;
  MicroBatch batch;
  bool training = false;
  uint64_t seed = 0;  // dropout: with step and the element's global index, the whole state
  uint32_t step = 0;
  float loss_scale = 1.0f;  // 1 / valid tokens of the global batch
  // The tp axis; null where a model was built for one lane.
  const TensorParallel* tp = nullptr;
  int lane = 0;  // that of this rank's which the layer at hand belongs to

  Tensor weight(ParamUse use) const {
    use.lane = lane;
    return params.weight(use);
  }
  Tensor grad(ParamUse use) const {
    use.lane = lane;
    return params.grad(use);
  }
  Tensor grad_to_write(ParamUse use, bool* adds) const {
    use.lane = lane;
    return params.grad_to_write(use, adds);
  }
  Context of_lane(int64_t which) const {
    Context context = *this;
    context.lane = static_cast<int>(which);
    return context;
  }
  // Rows of activations between the regions of tensor parallelism: of all tokens, or of the rank's own.
  int64_t own_tokens() const { return tp ? tp->own_tokens(batch.seq_len()) : batch.seq_len(); }
};

// What forward keeps for backward: tensors in an order that only the layer knows, and those of its parts.
struct Saved {
  std::vector<Tensor> tensors;
  std::vector<Saved> children;
  std::shared_ptr<void> foreign;  // of a layer that is not native
};

// The work of one micro-batch of `num_samples` x `seq_len` tokens, on one rank. The one description of cost:
// planner, simulator, MFU and memory report read it.
struct Cost {
  double forward_flops = 0;  // a fused multiply-add counts 2
  double backward_input_flops = 0;
  double backward_weight_flops = 0;
  int64_t bytes_moved = 0;  // forward; read and written by operations, caches ignored
  int64_t parameter_bytes = 0;
  // Kept from forward to backward, without the micro-batch itself and without the layer's own
  // output, which the layer that reads it counts: so the sum over a model counts every buffer once.
  int64_t saved_bytes = 0;
  int64_t comm_bytes = 0;  // sent by a rank, forward

  Cost& operator+=(const Cost& other);
  double total_flops() const { return forward_flops + backward_input_flops + backward_weight_flops; }
};

// How a model is built for tensor parallelism.
struct TensorLanes {
  int64_t lanes = 1;  // of the axis; 1: none of it
  int64_t size = 1;   // ranks of the axis
  int64_t local() const { return lanes / size; }
};

// A differentiable function of activations [rows, features], one token a row. Layers hold
// no tensors, so one object serves any number of micro-batches in flight.
class Layer {
 public:
  virtual ~Layer() = default;
  // `saved` is null where no backward follows. The result may share memory with x.
  virtual Tensor forward(const Context& context, const Tensor& x, Saved* saved) const = 0;
  // d(loss)/d(input) from d(loss)/d(output); undefined where the input has no gradient. Keeps in
  // `saved` what backward_weight needs.
  virtual Tensor backward_input(const Context& context, const Tensor& dy, Saved& saved) const = 0;
  // Adds to the gradients of the layer's parameters, one chain over tokens. After backward_input;
  // per lane in ascending order of micro-batches.
  virtual void backward_weight(const Context& context, Saved& saved) const;
  // Of an input of num_samples * seq_len rows: where tp cuts the tokens, seq_len are a rank's own.
  virtual Cost cost(int64_t num_samples, int64_t seq_len) const = 0;
};

using LayerPtr = std::unique_ptr<Layer>;

}  // namespace polyreme
