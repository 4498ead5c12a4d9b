"""Update rules by hand-computed values, and who is decayed."""

from __future__ import annotations

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, batches, local_part, make_trainer, refused
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY, tied=False)
SPECS = MODEL.param_specs()
DIMS = {spec["name"]: len(spec["shape"]) for spec in SPECS}
LAYOUTS = pytest.mark.parametrize("dp, zero", [(1, 0), (2, 0), (1, 1), (2, 1)])


def decays(**options):
    rule = pr.AdamW(**options)
    return dict(zip(DIMS, rule.decay_of(SPECS), strict=True))


def test_default_decays_parameters_of_two_dims_only():
    assert decays(weight_decay=0.1) == {name: 0.1 if dims >= 2 else 0.0 for name, dims in DIMS.items()}
    assert {DIMS[name] for name in DIMS} == {1, 2}


def test_without_decay_nothing_is_decayed():
    assert set(decays().values()) == {0.0}


def test_rules_by_name_come_first():
    found = decays(weight_decay=0.1, weight_decay_rules={"wte.*": 0.0, "*.ln_1.weight": 0.5})
    assert found["wte.weight"] == 0.0
    assert found["h.0.ln_1.weight"] == found["h.1.ln_1.weight"] == 0.5
    assert found["h.0.ln_1.bias"] == 0.0
    assert found["lm_head.weight"] == found["h.0.mlp.fc.weight"] == 0.1


def test_the_first_rule_that_matches_wins():
    assert decays(weight_decay_rules={"h.0.*": 0.25, "h.*": 0.75})["h.0.mlp.fc.bias"] == 0.25
    assert decays(weight_decay_rules={"h.*": 0.75, "h.0.*": 0.25})["h.0.mlp.fc.bias"] == 0.75


@pytest.mark.parametrize("rule", [pr.AdamW, pr.SGD])
def test_a_rule_that_matches_nothing_is_refused(rule, world):
    optimizer = rule(weight_decay_rules={"transformer.*": 0.0})
    refused(
        pr.InvalidArgument,
        ["'transformer.*'", "wte.weight"],
        lambda: make_trainer(world, MODEL, optimizer=optimizer),
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pr.AdamW(lr=-1e-3), ["AdamW", "lr=-0.001"]),
        (lambda: pr.AdamW(lr=float("nan")), ["lr=nan"]),
        (lambda: pr.SGD(lr=float("inf")), ["SGD", "lr=inf", "finite"]),
        (lambda: pr.AdamW(lr="1e-3"), ["lr='1e-3'", "schedule"]),
        (lambda: pr.AdamW(betas=(0.9, 1.0)), ["betas=(0.9, 1.0)", "beta < 1"]),
        (lambda: pr.AdamW(betas=(-0.1, 0.9)), ["betas=(-0.1, 0.9)"]),
        (lambda: pr.AdamW(betas=(0.9,)), ["betas=(0.9,)", "two"]),
        (lambda: pr.AdamW(eps=0.0), ["eps=0.0", "more than 0"]),
        (lambda: pr.AdamW(weight_decay=-0.1), ["weight_decay=-0.1"]),
        (lambda: pr.AdamW(weight_decay=float("inf")), ["weight_decay=inf"]),
        (lambda: pr.SGD(weight_decay_rules={"wte.*": -1.0}), ["wte.*=-1.0"]),
        (lambda: pr.SGD(momentum=1.0), ["momentum=1.0", "momentum < 1"]),
    ],
)
def test_bad_arguments_are_refused(make, words):
    refused(pr.InvalidArgument, words, make)


def test_configurations_are_frozen_and_have_keywords_only():
    with pytest.raises(AttributeError):
        pr.AdamW().lr = 1.0
    with pytest.raises(TypeError):
        pr.AdamW(1e-3)


def updates(world, optimizer, steps, zero=0):
    """The trainer after some steps on random batches, and the weights before and gradients of each."""
    trainer = make_trainer(world, MODEL, optimizer=optimizer, lanes=pr.Lanes(dp=2), zero=zero)
    history = []
    for tokens, targets in batches(steps, 8, MODEL, seed=3):
        before = {name: trainer.parameter(name) for name in DIMS}
        trainer.step(local_part(world, tokens), local_part(world, targets))
        history.append((before, {name: trainer.gradient(name) for name in DIMS}))
    return trainer, history


@LAYOUTS
def test_o_op_01_first_update_is_the_learning_rate(dp, zero):
    """Bias correction makes the first AdamW update lr * sign(g), wherever |g| is far above eps."""

    def run(world):
        trainer, [(before, gradient)] = updates(world, pr.AdamW(lr=0.1, eps=1e-8), 1, zero)
        for name in DIMS:
            large = np.abs(gradient[name]) > 1e-4
            moved = before[name] - trainer.parameter(name)
            np.testing.assert_allclose(moved[large], 0.1 * np.sign(gradient[name][large]), atol=2e-5)
        return trainer.applied_steps

    assert run_ranks(dp, run) == [1] * dp


@LAYOUTS
def test_o_op_01_three_updates_follow_the_definition(dp, zero):
    betas, eps, lr, decay = (0.875, 0.9990234375), 1e-4, 0.1, 0.1  # betas that fp32 has exactly

    def run(world):
        trainer, history = updates(world, pr.AdamW(lr=lr, betas=betas, eps=eps, weight_decay=decay), 3, zero)
        for name, dims in DIMS.items():
            weight = history[0][0][name].astype(np.float64)
            mean, square = np.zeros_like(weight), np.zeros_like(weight)
            for step, (_, gradients) in enumerate(history, start=1):
                gradient = gradients[name].astype(np.float64)
                mean = betas[0] * mean + (1 - betas[0]) * gradient
                square = betas[1] * square + (1 - betas[1]) * gradient**2
                corrected = mean / (1 - betas[0] ** step), np.sqrt(square / (1 - betas[1] ** step))
                weight = weight * (1 - lr * (decay if dims >= 2 else 0)) - lr * corrected[0] / (
                    corrected[1] + eps
                )
            np.testing.assert_allclose(trainer.parameter(name), weight, rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(trainer.optimizer_state(name, "exp_avg"), mean, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(
                trainer.optimizer_state(name, "exp_avg_sq"), square, rtol=1e-5, atol=1e-12
            )
        return trainer.applied_steps

    assert run_ranks(dp, run) == [3] * dp


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_follows_the_definition(world, momentum):
    trainer, history = updates(world, pr.SGD(lr=0.5, momentum=momentum, weight_decay=0.2), 3)
    for name, dims in DIMS.items():
        weight = history[0][0][name].astype(np.float64)
        buffer = np.zeros_like(weight)
        for _, gradients in history:
            buffer = momentum * buffer + gradients[name]
            weight = weight * (1 - 0.5 * (0.2 if dims >= 2 else 0)) - 0.5 * buffer
        np.testing.assert_allclose(trainer.parameter(name), weight, rtol=1e-5, atol=1e-7, err_msg=name)


@LAYOUTS
@pytest.mark.parametrize("rule", [pr.AdamW, pr.SGD])
def test_o_op_04_decay_by_dims_and_by_name(dp, zero, rule):
    """With gradients of exactly 0 all that is left of an update is the decay: 1 becomes 0.99."""
    optimizer = rule(lr=0.1, weight_decay=0.1, weight_decay_rules={"wpe.*": 0.0, "h.0.ln_1.bias": 0.1})

    def run(world):
        trainer = make_trainer(world, MODEL, optimizer=optimizer, lanes=pr.Lanes(dp=2), zero=zero)
        for name in DIMS:
            trainer.set_parameter(name, np.ones_like(trainer.parameter(name)))
        # A head of zeros gives every parameter before it a gradient of exactly 0.
        trainer.set_parameter("lm_head.weight", np.zeros_like(trainer.parameter("lm_head.weight")))
        tokens, targets = batches(1, 8, MODEL)[0]
        trainer.step(local_part(world, tokens), local_part(world, targets))
        for name, dims in DIMS.items():
            gradient = trainer.gradient(name)
            if name == "lm_head.weight":
                continue
            assert not gradient.any(), name
            decayed = (dims >= 2 and name != "wpe.weight") or name == "h.0.ln_1.bias"
            expected = np.float32(1 - 0.1 * 0.1) if decayed else np.float32(1)
            assert np.unique(trainer.parameter(name)) == [expected], name

    run_ranks(dp, run)


WHOLE_RULES = {
    "lion": pr.Lion(lr=1e-3, weight_decay=0.1),
    "lamb": pr.LAMB(lr=1e-2, weight_decay=0.1),
    "muon": pr.Muon(lr=1e-2, weight_decay=0.1, lr_rules={"h.0.*": 0.5}),
}


@pytest.mark.parametrize("rule", WHOLE_RULES)
def test_rules_have_the_same_bits_on_every_layout_and_stage(rule):
    """Also those whose update of an element needs a whole parameter, of which a rank has a part."""
    kinds = {"lion": ["exp_avg"], "lamb": ["exp_avg", "exp_avg_sq"], "muon": []}[rule]

    def run(world, zero):
        trainer, _ = updates(world, WHOLE_RULES[rule], 2, zero)
        state = [trainer.optimizer_state(name, kind) for name in DIMS for kind in kinds]
        return [array.tobytes() for array in [*(trainer.parameter(name) for name in DIMS), *state]]

    (reference,) = run_ranks(1, lambda world: run(world, 0))
    for dp, zero in ((2, 0), (2, 1), (2, 2), (2, 3)):
        assert run_ranks(dp, lambda world, zero=zero: run(world, zero)) == [reference] * dp, (dp, zero)


def test_muon_follows_the_definition(world):
    """A matrix of the model in float64; embeddings, head and vectors take AdamW."""
    momentum, lr, decay = 0.875, 0.125, 0.25
    optimizer = pr.Muon(lr=lr, momentum=momentum, weight_decay=decay, eps=1e-4)
    trainer, history = updates(world, optimizer, 3)
    name = "h.0.mlp.fc.weight"
    weight = history[0][0][name].astype(np.float64)
    buffer = np.zeros_like(weight)
    for _, gradients in history:
        gradient = gradients[name].astype(np.float64)
        buffer = momentum * buffer + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * buffer
        x /= np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = weight * (1 - lr * decay) - lr * 0.2 * max(weight.shape) ** 0.5 * x
    np.testing.assert_allclose(trainer.parameter(name), weight, rtol=1e-4, atol=1e-5)
    assert trainer.optimizer_state(name, "momentum").shape == weight.shape
    for vector in ("h.0.mlp.fc.bias", "wte.weight", "lm_head.weight"):
        assert trainer.optimizer_state(vector, "exp_avg_sq").any()


def test_factors_of_the_learning_rate_by_name(world):
    optimizer = pr.SGD(lr=0.5, lr_rules={"h.0.*": 0.5, "wte.*": 0.0})
    trainer, [(before, gradient)] = updates(world, optimizer, 1)
    for name in DIMS:
        factor = 0.25 if name.startswith("h.0.") else 0.0 if name.startswith("wte.") else 0.5
        expected = before[name] - factor * gradient[name]
        np.testing.assert_allclose(trainer.parameter(name), expected, rtol=1e-6, atol=1e-8, err_msg=name)
    refused(
        pr.InvalidArgument,
        ["lr_rules", "'x.*'"],
        lambda: make_trainer(world, MODEL, optimizer=pr.SGD(lr_rules={"x.*": 1.0})),
    )
