#pragma once

#include "tensor/tensor.h"

namespace polyreme::pipeline {

// What computes the chunks of one rank, as the executor sees it: neutral to where layers come from. All
// calls come from one thread, in the order of the rank's list; they enqueue on the executor's compute stream
// and do not wait. What a computation needs of an earlier one of its chunk and micro-batch the runner keeps.
// Whatever a call throws breaks the pipeline on every rank.
class StageRunner {
 public:
  virtual ~StageRunner() = default;

  // Contiguous memory for the tensor between `chunk` - 1 and `chunk`: the activation, or the gradient of it.
  // The executor receives into it, so both ranks must know shape and dtype, without a message.
  virtual Tensor make_boundary(int chunk, int micro_batch, bool is_gradient) = 0;

  // The chunk's output from its input, which is undefined at chunk 0. That of the last chunk is ignored: the
  // loss stays with the runner.
  virtual Tensor forward(int chunk, int micro_batch, Tensor input) = 0;
  // The gradient of the chunk's input (ignored at chunk 0) from that of its output (undefined at the last
  // chunk).
  virtual Tensor backward_input(int chunk, int micro_batch, Tensor output_grad) = 0;
  // Adds to the gradients of the chunk's weights; in ascending order of micro-batches within a lane.
  virtual void backward_weight(int chunk, int micro_batch) = 0;
  // Both in one; override it where that needs less memory or time.
  virtual Tensor backward(int chunk, int micro_batch, Tensor output_grad) {
    Tensor input_grad = backward_input(chunk, micro_batch, std::move(output_grad));
    backward_weight(chunk, micro_batch);
    return input_grad;
  }

  // Collectives along the other axes; called only for schedules that have them.
  virtual void gather(int /*chunk*/) {}
  virtual void release(int /*chunk*/) {}
  virtual void reduce(int /*chunk*/) {}
  virtual void step() {}
};

}  // namespace polyreme::pipeline
