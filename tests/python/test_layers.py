"""Layers written in Python take the place of native ones: the same bits where the arithmetic is the same."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, fingerprint, refused
from polyreme.testing import run_ranks

SIZES = dict(layers=3, hidden=16, heads=2, vocab=31, seq_len=8, mlp_hidden=24)
NATIVE = pr.models.GPT(**SIZES)
DATA = batches(2, 4, NATIVE)


def chain(total, left, right):
    """total + left @ right as one chain over the inner dim of fused multiply-adds, as the native product has it.

    A product of two fp32 numbers is exact in fp64, so rounding twice differs from once in a case of about 2^29.
    """
    for k in range(left.shape[1]):
        product = left[:, k, None].astype(np.float64) * right[k].astype(np.float64)
        total = (total.astype(np.float64) + product).astype(np.float32)
    return total


class Linear(pr.layers.Layer):
    """y = x W^T + b."""

    def __init__(self, std):
        self.std = std

    def parameters(self, inputs, outputs):
        return {
            "weight": pr.layers.Parameter(shape=(outputs, inputs), init=self.std, cut="row"),
            "bias": pr.layers.Parameter(shape=(outputs,), init="zeros"),
        }

    def forward(self, call):
        weight = call.weights["weight"]
        zeros = np.zeros((len(call.x), len(weight)), np.float32)
        return chain(zeros, call.x, weight.T) + call.weights["bias"]

    def backward_input(self, call):
        return chain(np.zeros_like(call.x), call.dy, call.weights["weight"])

    def backward_weight(self, call):
        if "weight" in call.grads:
            call.grads["weight"][...] = chain(call.grads["weight"], call.dy.T, call.x)
        if "bias" in call.grads:
            for row in call.dy:
                call.grads["bias"] += row

    def cost(self, num_samples, seq_len):
        return dict.fromkeys(("forward_flops", "backward_input_flops", "backward_weight_flops"), 1e3)


class Gelu(pr.layers.Layer):
    """The tanh form, in fp64, keeping what its backward needs."""

    def forward(self, call):
        x = call.x.astype(np.float64)
        call.t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + call.t)

    def backward_input(self, call):
        x = call.x.astype(np.float64)
        slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        return call.dy * (0.5 * (1 + call.t) + 0.5 * x * (1 - call.t**2) * slope)


LINEAR = pr.models.GPT(**SIZES, replace={"h.*.mlp.proj": Linear(0.02 / np.sqrt(2 * SIZES["layers"]))})
GELU = pr.models.GPT(**SIZES, replace={"h.1.mlp.gelu": Gelu()})


def train(world, model, *, pp=1, **options):
    mesh = pr.Mesh(world, pp=pp)
    options = {"global_batch": 4, "lanes": pr.Lanes(dp=2), "clip_norm": 0.5, **options}
    trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(lr=1e-2, eps=1e-4), **options)
    rows, place = 4 // mesh.size("dp"), mesh.coordinate("dp")
    part = slice(place * rows, (place + 1) * rows)
    norms = [trainer.step(tokens[part], targets[part]) for tokens, targets in DATA]
    state = None if trainer.frozen else fingerprint(trainer)
    weights = [trainer.parameter(name).tobytes() for name in trainer.parameter_names()]
    return [(s.loss.hex(), s.grad_norm.hex()) for s in norms], state, weights


def alone(model, **options):
    return run_ranks(1, lambda world: train(world, model, **options))[0]


def test_a_linear_layer_has_the_native_bits():
    native = alone(NATIVE)
    assert alone(LINEAR) == native
    assert alone(LINEAR, micro_batch=2) == native
    assert run_ranks(2, lambda world: train(world, LINEAR, zero=3)) == [native] * 2
    options = dict(pp=2, zero=2, schedule=pr.schedule.zb_h1(), micro_batch=2)
    assert run_ranks(4, lambda world: train(world, LINEAR, **options)) == [native] * 4
    recompute = pr.models.GPT(**SIZES, replace=LINEAR.replace, recompute=True)
    assert alone(recompute) == native


@pytest.mark.parametrize("seed", range(2))
def test_on_the_deferred_device(seed):
    def run(world):
        return train(world, LINEAR, pp=2, schedule=pr.schedule.zb_h1(), micro_batch=1, split=[1, 2])

    assert run_ranks(2, run, executor="deferred", schedule_seed=seed) == [alone(NATIVE)] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_activation_is_as_near_as_rounding(precision):
    (native, *_), (own, *_) = alone(NATIVE, precision=precision), alone(GELU, precision=precision)
    for ours, theirs in zip(own, native, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert float.fromhex(a) == pytest.approx(
                float.fromhex(b), rel=1e-5 if precision == "fp32" else 1e-2
            )


def test_frozen_parameters_get_no_gradient():
    frozen = ["h.0.mlp.proj.*", "h.1.mlp.proj.bias"]
    assert alone(LINEAR, frozen=frozen) == alone(NATIVE, frozen=frozen)


def test_a_checkpoint_goes_on_with_it_on_another_layout(tmp_path):
    def save(world):
        trainer = pr.Trainer(LINEAR, pr.Mesh(world, pp=2), optimizer=pr.AdamW(lr=1e-2), global_batch=4)
        trainer.step(*DATA[0])
        with pr.Checkpointer(tmp_path, every=1) as checkpoints:
            checkpoints.save(trainer)
        return trainer.step(*DATA[1]).loss

    def load(world, model):
        trainer = pr.Trainer(model, pr.Mesh(world), optimizer=pr.AdamW(lr=1e-2), global_batch=4)
        with pr.Checkpointer(tmp_path, every=1) as checkpoints:
            trainer.resume(checkpoints, must_exist=True)
        return trainer.step(*DATA[1]).loss

    saved = run_ranks(2, save)
    assert run_ranks(1, lambda world: load(world, LINEAR)) == saved[:1]


def test_it_is_part_of_a_forecast_and_of_cost():
    (told,) = pr.forecast(LINEAR, {"dp": 1}, optimizer=pr.AdamW(), global_batch=4)
    assert told.kept_bytes > 0
    assert NATIVE.cost()["forward_flops"] - LINEAR.cost()["forward_flops"] > 0


@pytest.mark.torch
def test_a_block_of_pytorch_trains():
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(16, 32), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(32, 16)
            )

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = pr.models.GPT(**SIZES, replace={"h.2": pr.layers.TorchLayer(Block)})
    names = set(model.param_specs()[i]["name"] for i in range(len(model.param_specs())))
    assert {"h.2.norm_weight", "h.2.mlp_0_weight", "h.2.mlp_2_bias"} <= names

    def run(world, pp):
        trainer = pr.Trainer(
            model, pr.Mesh(world, pp=pp), optimizer=pr.AdamW(lr=1e-2), global_batch=4, micro_batch=2
        )
        return [trainer.step(*DATA[0]).loss for _ in range(20)]

    one = run_ranks(1, lambda world: run(world, 1))[0]
    assert one[-1] < 0.5 * one[0]
    assert run_ranks(2, lambda world: run(world, 2)) == [one] * 2


def test_what_goes_wrong_names_the_place():
    class Broken(Gelu):
        def forward(self, call):
            if call.step == 1:
                raise ZeroDivisionError("none left")
            return call.x[:, :1] if call.first_sample else super().forward(call)

    def run(world, message, **options):
        model = pr.models.GPT(**SIZES, replace={"h.1.mlp.gelu": Broken()})
        refused(pr.errors.Error, ["'h.1.mlp.gelu'", *message], lambda: train(world, model, **options))

    run_ranks(
        1, lambda world: run(world, ["ZeroDivisionError", "none left"], micro_batch=4, lanes=pr.Lanes(dp=1))
    )
    run_ranks(1, lambda world: run(world, ["returned", "[16, 1]", "expected [16, 24]"], micro_batch=2))


def test_refusals():
    def make(replace):
        return lambda: pr.models.GPT(**SIZES, replace=replace).param_specs()

    refused(pr.InvalidArgument, ["'h.*.silu'", "h.0.mlp.gelu", "ln_f"], make({"h.*.silu": Gelu()}))
    refused(pr.InvalidArgument, ["'ln_f'", "Layer"], make({"ln_f": 3}))
    refused(pr.InvalidArgument, ["cut='row'"], lambda: pr.layers.Parameter(shape=(3,), cut="row"))

    def body(world):
        def along_tp():
            return pr.Trainer(GELU, pr.Mesh(world, tp=2), optimizer=pr.SGD(lr=0.1), global_batch=4)

        refused(pr.errors.NotAvailable, ["Gelu", "lanes.tp=2", "tp=1"], along_tp)

    run_ranks(2, body)
