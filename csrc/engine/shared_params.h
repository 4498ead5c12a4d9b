#pragma once

#include <vector>

#include "comm/communicator.h"
#include "engine/memory_terms.h"
#include "engine/param_store.h"
#include "engine/stage_part.h"

namespace polyreme {

// The parameters that two chunks of a pipeline use (a tied embedding and head), see SharedParam. The stage of
// the owning chunk keeps, reduces and updates one. The other chunk has a copy of the weight and, as a further
// use has on one rank too, an accumulator of its own for every lane, which the owner adds to its own when all
// lanes are through.
class SharedParams final : public SharedUses {
 public:
  // All arguments must outlive this object; `stages` is the pp axis, `trainable` of the model's parameters.
  SharedParams(const Model& model, const StagePart& part, Communicator& stages, Stream& stream,
               ParamStore& params, const std::vector<uint8_t>& trainable);

  void begin_step();
  // The backward of `layers` on the last micro-batch of a lane, or of a round of it, has run.
  void complete_lane(const LayerRange& layers);
  // After all lanes: the owners complete their gradients. Collective along pp.
  void add_gradients();
  // After an update: the copies follow. Collective along pp.
  void share_weights();

  // Weights that this rank has a copy of; and what a step of `lanes` lanes (of rounds) has of gradients at
  // once.
  std::vector<MemoryTerm> memory(int64_t lanes) const;

  // A copy that this rank has; waits.
  void write(int param, int lane, const std::vector<float>& values);

  bool has(const ParamUse& use) override { return find(use.param, use.lane) != nullptr; }
  Tensor weight(const ParamUse& use) override;
  Tensor grad(const ParamUse& use) override;
  bool is_trainable(int param) override {
    return trainable_.empty() || trainable_[static_cast<size_t>(param)] != 0;
  }

 private:
  struct Share {
    SharedParam what;
    bool is_owner = false, is_user = false;
    Tensor weight;              // of a user that is not the owner
    std::vector<Tensor> grads;  // of the user, by lane
    bool is_begun = false;      // the last of them
  };
  // Of a parameter that this rank uses without the chunk that owns it; else null.
  Share* find(int param, int lane);
  int local_of(const Share& share) const { return part_.local_of({share.what.param, 0, share.what.lane}); }
  DType dtype_of(const Share& share) const {
    return model_.registry.specs()[static_cast<size_t>(share.what.param)].dtype;
  }
  Tensor new_tensor(const Share& share, DType dtype, const char* label) const;

  const Model& model_;
  const StagePart& part_;
  Communicator& stages_;
  Stream& stream_;
  ParamStore& params_;
  const std::vector<uint8_t>& trainable_;
  std::vector<Share> shares_;
};

}  // namespace polyreme
