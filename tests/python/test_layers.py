"""Layers written in Python take the place of native ones: the same bits where the arithmetic is the same."""

from __future__ import annotations

import functools

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
        product = chain(zeros, call.x, weight.T)
        return product + call.weights["bias"] if call.lane == 0 else product

    def backward_input(self, call):
        return chain(np.zeros_like(call.x), call.dy, call.weights["weight"])

    def backward_weight(self, call):
        if "weight" in call.grads:
            call.grads["weight"][...] = chain(call.grads["weight"], call.dy.T, call.x)
        if "bias" in call.grads and call.lane == 0:
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


class Whole(Linear):
    """Not cut."""

    def __init__(self):
        super().__init__(0.02)

    def parameters(self, inputs, outputs):
        return {"weight": pr.layers.Parameter(shape=(outputs, inputs))}


class Odd(Gelu):
    def parameters(self, inputs, outputs):
        return {"odd": pr.layers.Parameter(shape=(3, inputs), cut="column")}


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
        def along_tp(layer, place="h.1.mlp.proj"):
            model = pr.models.GPT(**SIZES, replace={place: layer})
            return lambda: pr.Trainer(model, pr.Mesh(world, tp=2), optimizer=pr.SGD(lr=0.1), global_batch=4)

        words = ["'h.1.mlp.proj'", "Whole", "lanes.tp=2", "cut='row'"]
        refused(pr.InvalidArgument, words, along_tp(Whole()))
        refused(pr.InvalidArgument, ["'h.1.odd'", "3", "2"], along_tp(Odd(), "h.1"))

    run_ranks(2, body)


# ---- with lanes of tensor parallelism ----


class Mixer(pr.layers.Layer):
    """y = x + scale * (mean of the tokens up to this one): a block that nobody cut, and that mixes tokens."""

    def parameters(self, inputs, outputs):
        return {"scale": pr.layers.Parameter(shape=(inputs,), init="ones")}

    def _means(self, call, values, reverse=False):
        rows = values.reshape(call.num_samples, call.seq_len, -1).astype(np.float64)
        counts = np.arange(1, call.seq_len + 1)[None, :, None]
        if reverse:
            return np.cumsum((rows / counts)[:, ::-1], axis=1)[:, ::-1].reshape(values.shape)
        return (np.cumsum(rows, axis=1) / counts).reshape(values.shape)

    def forward(self, call):
        call.mean = self._means(call, call.x)
        return call.x + call.weights["scale"] * call.mean

    def backward_input(self, call):
        return call.dy + self._means(call, call.dy * call.weights["scale"], reverse=True)

    def backward_weight(self, call):
        for row in call.dy * call.mean:
            call.grads["scale"] += row.astype(np.float32)


class Mlp(pr.layers.Layer):
    """A block with a skip connection: y = x + W2 relu(W1 (g * x) + b1) + b2, column- and row-parallel."""

    def parameters(self, inputs, outputs):
        kind = pr.layers.Parameter
        return {
            "gain": kind(shape=(inputs,), init="ones"),
            "up": kind(shape=(24, inputs), init=0.1, cut="column"),
            "up_bias": kind(shape=(24,), init=0.1, cut="column"),
            "down": kind(shape=(outputs, 24), init=0.1, cut="row"),
            "down_bias": kind(shape=(outputs,), init=0.1),
        }

    def forward(self, call):
        w = call.weights
        assert len(w["up"]) == 24 // call.lanes
        call.scaled = call.x * w["gain"]
        call.h = np.maximum(call.scaled @ w["up"].T + w["up_bias"], 0)
        y = call.h @ w["down"].T
        return y + w["down_bias"] + call.x if call.lane == 0 else y

    def backward_input(self, call):
        w = call.weights
        call.dh = (call.dy @ w["down"]) * (call.h > 0)
        call.dscaled = call.dh @ w["up"]
        dx = call.dscaled * w["gain"]
        return dx + call.dy if call.lane == 0 else dx

    def backward_weight(self, call):
        terms = {
            "gain": lambda i: call.dscaled[i] * call.x[i],
            "up": lambda i: np.outer(call.dh[i], call.scaled[i]),
            "up_bias": lambda i: call.dh[i],
            "down": lambda i: np.outer(call.dy[i], call.h[i]),
        }
        if call.lane == 0:
            terms["down_bias"] = lambda i: call.dy[i]
        for name, term in terms.items():
            if name in call.grads:
                for i in range(len(call.x)):
                    call.grads[name] += term(i)


CUT = pr.models.GPT(
    **SIZES | dict(heads=4),
    replace={
        "h.0": Mixer(),
        "h.1": Mlp(),
        "h.2.ln_2": Mixer(),
        "h.2.mlp.gelu": Gelu(),
        "h.2.mlp.proj": Linear(0.02),
    },
)


def train_cut(world, *, model=CUT, tp=1, pp=1, lanes=4, **options):
    mesh = pr.Mesh(world, pp=pp, tp=tp)
    options = {"micro_batch": 2, "clip_norm": 0.5, **options}
    rule = pr.AdamW(lr=1e-2, eps=1e-4)
    trainer = pr.Trainer(
        model, mesh, optimizer=rule, global_batch=4, lanes=pr.Lanes(dp=2, tp=lanes), **options
    )
    rows, place = 4 // mesh.size("dp"), mesh.coordinate("dp")
    part = slice(place * rows, (place + 1) * rows)
    stats = [trainer.step(tokens[part], targets[part]) for tokens, targets in DATA]
    if mesh.size("tp") > 1:
        trainer.check_replicas()
    return [(s.loss.hex(), s.grad_norm.hex()) for s in stats], fingerprint(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_along_tp_every_size_has_the_bits_of_one_rank(precision):
    (expected,) = run_ranks(1, lambda world: train_cut(world, precision=precision))
    layouts = [(2, dict(tp=2)), (4, dict(tp=4))]
    if precision == "fp32":
        layouts += [(8, dict(tp=2, pp=2, zero=2)), (4, dict(tp=2, zero=3))]
    for ranks, options in layouts:
        run = functools.partial(train_cut, precision=precision, **options)
        assert run_ranks(ranks, run) == [expected] * ranks, options


def test_along_tp_on_the_deferred_device():
    expected = run_ranks(1, train_cut)
    for seed in range(2):
        run = functools.partial(train_cut, tp=2, schedule=pr.schedule.zb_h1(), pp=2)
        assert run_ranks(4, run, executor="deferred", schedule_seed=seed) == expected * 4


def test_along_tp_gradients_are_those_of_one_lane():
    def gradients(world, lanes):
        tp = world.size
        trainer = pr.Trainer(
            CUT, pr.Mesh(world, tp=tp), optimizer=pr.SGD(lr=0.1), global_batch=4, lanes=pr.Lanes(tp=lanes)
        )
        trainer.step(*DATA[0])
        return {name: trainer.gradient(name) for name in trainer.parameter_names()}

    (alone,), (cut, _) = (
        run_ranks(1, lambda world: gradients(world, 1)),
        run_ranks(2, lambda world: gradients(world, 2)),
    )
    for name, gradient in alone.items():
        assert np.abs(cut[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


@pytest.mark.torch
def test_a_module_of_pytorch_is_cut_by_naming_its_linear_layers():
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    layer = pr.layers.TorchLayer(make, cut={"1": "column", "3": "row"}, skip=True)
    model = pr.models.GPT(**SIZES | dict(heads=4), replace={"h.1": layer})
    parts = {spec["name"]: spec["cuts"] for spec in model.param_specs()}
    assert [bool(parts[f"h.1.{name}"]) for name in ("1_weight", "1_bias", "3_weight", "3_bias")] == [
        True,
        True,
        True,
        False,
    ]
    torch.set_num_threads(1)
    (expected,) = run_ranks(1, lambda world: train_cut(world, model=model))
    for tp in (2, 4):
        assert run_ranks(tp, lambda world, tp=tp: train_cut(world, model=model, tp=tp)) == [expected] * tp
    (whole,) = run_ranks(1, lambda world: train_cut(world, model=model, lanes=1))
    for ours, theirs in zip(expected[0], whole[0], strict=True):
        assert float.fromhex(ours[0]) == pytest.approx(float.fromhex(theirs[0]), rel=1e-5)
    refused(
        pr.InvalidArgument,
        ["'2': 'row'", "1, 3"],
        lambda: pr.layers.TorchLayer(make, cut={"2": "row"}),
    )
