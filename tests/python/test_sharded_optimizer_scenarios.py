"""ZeRO on arrays of one's own: the scenarios of the catalogue on the linear-loss model, named after their ids."""

from __future__ import annotations

import math

import numpy as np
import polyreme as pr
import pytest
from polyreme.testing import run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
DPS = pytest.mark.parametrize("dp", [1, 2])


def on_ranks(dp, function):
    """function(group) on dp ranks."""
    return run_ranks(dp, lambda world: function(pr.Mesh(world)["dp"]))


def scalars(*names, dtype=np.float32, value=0.0):
    return {name: np.full(1, value, dtype) for name in names}


def sgd(**options):
    return pr.SGD(lr=1.0, **options)


def ones(value=1.0, dtype=np.float32):
    return np.full(1, value, dtype)


# ---- accumulation ----


def test_o_ga_01_token_mean_over_the_whole_window():
    def alone(group):
        optimizer = pr.ShardedOptimizer(scalars("w"), group, rule=sgd())
        optimizer.accumulate({"w": ones(6)}, count=3)
        stats = optimizer.step({"w": ones(10)}, count=1)
        return float(optimizer.gradient("w")[0]), stats.grad_norm, stats.count

    def both(group):
        optimizer = pr.ShardedOptimizer(scalars("w"), group, rule=sgd())
        grad, count = [(6, 3), (10, 1)][group.rank]
        stats = optimizer.step({"w": ones(grad)}, count=count)
        return float(optimizer.gradient("w")[0]), stats.grad_norm, stats.count

    assert on_ranks(1, alone) + on_ranks(2, both) == [(4.0, 4.0, 4)] * 3


@STAGES
def test_o_ga_02_uneven_valid_tokens(stage):
    data = [[(5.0, 5), (9.0, 1)], [(4.0, 2), (0.0, 0)]]
    for order in ((0, 1), (1, 0)):

        def body(group, order=order):
            optimizer = pr.ShardedOptimizer(scalars("w"), group, stage=stage, rule=sgd())
            (first, n), (second, m) = data[order[group.rank]]
            optimizer.accumulate({"w": ones(first)}, count=n)
            optimizer.step({"w": ones(second)}, count=m)
            return float(optimizer.gradient("w")[0])

        assert on_ranks(2, body) == [2.25, 2.25]


@STAGES
def test_o_ga_03_a_rank_whose_labels_are_all_masked(stage):
    def body(group):
        params = scalars("w", value=1.0)
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=pr.SGD(lr=0.5))
        seen = []
        for counts in ((4, 0), (0, 0), (1, 1)):
            count = counts[group.rank]
            stats = optimizer.step({"w": ones(2.0 * count)}, count=count)
            seen.append((float(params["w"][0]), stats.grad_norm, stats.skipped))
        return seen

    for seen in on_ranks(2, body):
        assert seen == [(0.0, 2.0, False), (0.0, 0.0, True), (-1.0, 2.0, False)]


@STAGES
@pytest.mark.parametrize("declared", [False, True])
def test_o_ga_04_only_the_last_micro_batch_survives(stage, declared):
    def body(group):
        micro_batches = 4 if declared else None
        optimizer = pr.ShardedOptimizer(
            scalars("w"), group, stage=stage, rule=sgd(), micro_batches=micro_batches
        )
        grads = np.arange(1, 5) + 4 * group.rank
        for grad in grads[:3]:
            optimizer.accumulate({"w": ones(grad)})
        optimizer.step({"w": ones(grads[3])})
        return float(optimizer.gradient("w")[0])

    assert on_ranks(2, body) == [4.5, 4.5]


def test_o_ga_05_the_last_micro_batch_is_part_of_the_reduction():
    torch = pytest.importorskip("torch")

    def body(group):
        w = torch.zeros(1, dtype=torch.bfloat16)
        optimizer = pr.ShardedOptimizer({"w": w}, group, stage=1, rule=sgd())
        first, second = [(1, 2), (3, 4)][group.rank]
        optimizer.accumulate({"w": torch.full((1,), float(first), dtype=torch.bfloat16)})
        optimizer.step({"w": torch.full((1,), float(second), dtype=torch.bfloat16)})
        return float(optimizer.gradient("w")[0]), float(w[0])

    assert on_ranks(2, body) == [(2.5, -2.5)] * 2


@pytest.mark.parametrize("declared", [None, 4])
@pytest.mark.parametrize("offload", [False, True])
def test_o_ga_06_the_counter_of_micro_batches_starts_again(declared, offload):
    def body(group):
        params = scalars("w")
        optimizer = pr.ShardedOptimizer(
            params, group, stage=2, rule=sgd(), micro_batches=declared, offload=offload
        )
        seen = []
        for _ in range(3):
            for grad in (1, 2, 3):
                optimizer.accumulate({"w": ones(grad)})
            optimizer.step({"w": ones(4)})
            seen.append(float(params["w"][0]))
        return seen

    assert on_ranks(2, body) == [[-2.5, -5.0, -7.5]] * 2


# ---- clipping ----


def test_o_cl_04_plain_data_parallel_norm_is_counted_once():
    def body(group):
        params = scalars("w")
        optimizer = pr.ShardedOptimizer(params, group, stage=0, rule=sgd(), clip_norm=1.0)
        stats = optimizer.step({"w": ones(0.8)})
        return stats.grad_norm, float(params["w"][0])

    assert on_ranks(2, body) == [(float(np.float32(0.8)), -float(np.float32(0.8)))] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_o_cl_05_norm_over_sharded_gradients(stage):
    def body(group):
        # Each ends a bucket of its own: different ranks may own them.
        params = scalars("a", "b")
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=sgd(), clip_norm=1.0, bucket_bytes=1)
        stats = optimizer.step({"a": ones(3), "b": ones(4)})
        return stats.grad_norm, float(params["a"][0]), float(params["b"][0])

    for norm, a, b in on_ranks(2, body):
        assert norm == 5.0
        assert (a, b) == pytest.approx((-0.6, -0.8), abs=1e-6)

    grads = {name: np.random.default_rng(1).normal(size=n).astype(np.float32) for name, n in SIZES.items()}

    def padded(group):
        params = {name: np.zeros(n, np.float32) for name, n in SIZES.items()}
        return pr.ShardedOptimizer(params, group, stage=stage, rule=sgd()).step(grads).grad_norm

    exact = math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in grads.values()))
    norms = on_ranks(4, padded)
    assert norms == [norms[0]] * 4
    assert norms[0] == pytest.approx(exact, rel=1e-14)


SIZES = {"a": 3, "b": 5, "c": 1}


@pytest.mark.parametrize("order, expected", [(1, 7.0), (2, 5.0), (3, 91 ** (1 / 3)), (math.inf, 4.0)])
def test_o_cl_06_norms_of_other_orders(order, expected):
    def body(group):
        optimizer = pr.ShardedOptimizer(
            scalars("a", "b"), group, stage=2, rule=sgd(), norm_type=order, bucket_bytes=1
        )
        return optimizer.step({"a": ones(3), "b": ones(4)}).grad_norm

    assert on_ranks(2, body) == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize("stage", [1, 2])
def test_o_cl_07_padding_reaches_neither_norm_nor_moments(stage):
    rng = np.random.default_rng(3)
    start = {name: rng.normal(size=n) for name, n in SIZES.items()}
    grads = [{name: rng.normal(size=n).astype(np.float32) for name, n in SIZES.items()} for _ in range(10)]

    def body(group):
        params = {name: value.astype(np.float32) for name, value in start.items()}
        rule = pr.AdamW(lr=1e-2, weight_decay=0.1, weight_decay_rules={"*": 0.1}, eps=1e-4)
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=rule)
        norms = [optimizer.step(grad).grad_norm for grad in grads]
        return norms, params

    p = {name: value.astype(np.float32).astype(np.float64) for name, value in start.items()}
    m, v = ({name: np.zeros(n) for name, n in SIZES.items()} for _ in range(2))
    norms = []
    for step, grad in enumerate(grads, 1):
        norms.append(math.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in grad.values())))
        for name in SIZES:
            g = grad[name].astype(np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-4)
            p[name] -= 1e-2 * (update + 0.1 * p[name])
    for found, params in run_ranks(4, lambda world: body(pr.Mesh(world)["dp"]), executor="immediate"):
        assert found == pytest.approx(norms, rel=1e-13)
        for name in SIZES:
            np.testing.assert_allclose(params[name], p[name], rtol=1e-5, atol=1e-6)


# ---- parameters without gradients ----


@pytest.mark.torch
@STAGES
@DPS
def test_o_uf_01_a_globally_unused_parameter_stays(stage, dp):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = {step: rng.normal(size=(2, 4, 3)).astype(np.float32) for step in range(10)}

    def body(group):
        u, w = (torch.full((4, 3), 0.5) for _ in range(2))
        rule = pr.AdamW(lr=1e-2, weight_decay=0.1)
        optimizer = pr.ShardedOptimizer({"u": u, "w": w}, group, stage=stage, rule=rule)
        for step in range(10):
            grads = {"w": torch.tensor(values[step][1])}
            if step < 2:
                grads["u"] = torch.tensor(values[step][0])
            optimizer.step(grads)
            if step == 1:
                after_second = u.clone()
        assert torch.equal(u, after_second)
        return u.numpy().copy(), w.numpy().copy()

    u, w = (torch.nn.Parameter(torch.full((4, 3), 0.5)) for _ in range(2))
    rival = torch.optim.AdamW([u, w], lr=1e-2, weight_decay=0.1)
    for step in range(10):
        u.grad = torch.tensor(values[step][0]) if step < 2 else None
        w.grad = torch.tensor(values[step][1])
        rival.step()
    for got_u, got_w in on_ranks(dp, body):
        np.testing.assert_allclose(got_u, u.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_w, w.detach().numpy(), rtol=1e-5, atol=1e-6)


@STAGES
def test_o_uf_02_a_parameter_that_one_rank_uses(stage):
    def body(group):
        params = scalars("p")
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=sgd())
        optimizer.step({"p": ones(6)} if group.rank == 0 else {"p": None})
        return float(params["p"][0])

    assert on_ranks(2, body) == [-3.0, -3.0]


def test_o_uf_04_freeze_save_load_unfreeze():
    rng = np.random.default_rng(5)
    grads = [{n: rng.normal(size=(3, 2)).astype(np.float32) for n in "AB"} for _ in range(9)]

    def make(group):
        params = {name: np.ones((3, 2), np.float32) for name in "AB"}
        return params, pr.ShardedOptimizer(params, group, stage=2, rule=pr.AdamW(lr=1e-2, weight_decay=0.1))

    def steps(optimizer, begin, end):
        for step in range(begin, end):
            frozen = 3 <= step < 7
            optimizer.step({"A": grads[step]["A"], "B": None if frozen else grads[step]["B"]})

    def everything(params, optimizer):
        state = optimizer.state_dict()
        return [params[n].tobytes() for n in "AB"] + [
            state["state"][kind][n].tobytes() for kind in ("exp_avg", "exp_avg_sq") for n in "AB"
        ]

    def whole(group):
        params, optimizer = make(group)
        steps(optimizer, 0, 9)
        return everything(params, optimizer)

    def stopped(group):
        _, first = make(group)
        steps(first, 0, 5)
        saved = first.state_dict()
        params, second = make(group)
        second.load_state_dict(saved)
        steps(second, 5, 9)
        assert second.updates() == {"A": 9, "B": 5}
        return everything(params, second)

    assert on_ranks(2, whole) == on_ranks(2, stopped)


# ---- sizes, shapes, dtypes ----


@pytest.mark.parametrize("stage", [1, 2])
def test_o_sh_01_an_empty_shard_is_saved_and_loaded(stage):
    shapes = {"a": (6,), "b": (1, 5), "c": (3, 5), "d": (1,)}
    rng = np.random.default_rng(7)
    grads = [{n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)]

    def make(group):
        params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        return params, pr.ShardedOptimizer(params, group, stage=stage, rule=pr.AdamW(lr=1e-2))

    def saved(group):
        _, optimizer = make(group)
        for grad in grads:
            optimizer.step(grad)
        return optimizer.state_dict()

    before = on_ranks(4, saved)[0]
    for dp in (4, 3, 2, 1, 8):

        def loaded(group):
            params, optimizer = make(group)
            optimizer.load_state_dict(before)
            return params, optimizer.state_dict()

        for params, after in on_ranks(dp, loaded):
            for name in shapes:
                assert params[name].tobytes() == before["weight"][name].tobytes()
                for kind in ("exp_avg", "exp_avg_sq"):
                    assert after["state"][kind][name].tobytes() == before["state"][kind][name].tobytes()
            assert after["updates"] == before["updates"] == dict.fromkeys(shapes, 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_o_sh_02_parameters_smaller_than_the_world(stage):
    def body(group):
        params = {"s": np.ones((), np.float16), "v": np.ones(3, np.float16)}
        scaler = pr.LossScaler(initial=1024)
        optimizer = pr.ShardedOptimizer(
            params,
            group,
            stage=stage,
            rule=pr.AdamW(lr=1e-2),
            loss_scaler=scaler,
            lanes=8,
            micro_batches=8 // group.size,
        )
        for step in range(5):
            grad = np.float16(np.inf if step == 1 else 2.0 * scaler.scale / 64)
            for micro_batch in range(8 // group.size):
                grads = {"s": np.full((), grad), "v": np.full(3, grad)}
                last = micro_batch == 8 // group.size - 1
                stats = optimizer.step(grads) if last else optimizer.accumulate(grads)
            assert stats.skipped == (step == 1)
        return params["s"].tobytes(), params["v"].tobytes(), scaler.scale

    (alone,) = on_ranks(1, body)
    assert on_ranks(8, body) == [alone] * 8
    assert alone[2] == 512


@STAGES
def test_o_sh_05_a_parameter_that_is_a_transposed_view(stage):
    before = np.float32([[0, 3], [1, 4], [2, 5]])

    def body(group):
        w = np.arange(6, dtype=np.float32).reshape(2, 3).T
        optimizer = pr.ShardedOptimizer({"w": w}, group, stage=stage, rule=sgd())
        assert np.array_equal(optimizer.weight("w"), before)
        assert np.array_equal(w, before)
        optimizer.step({"w": np.ones((3, 2), np.float32)})
        assert np.array_equal(w, before - 1)
        again = np.zeros((2, 3), np.float32).T
        other = pr.ShardedOptimizer({"w": again}, group, stage=stage, rule=sgd())
        other.load_state_dict(optimizer.state_dict())
        assert np.array_equal(again, before - 1)

    on_ranks(2, body)


@pytest.mark.torch
@STAGES
def test_o_sh_06_bf16_and_fp32_parameters_together(stage):
    torch = pytest.importorskip("torch")

    def body(group):
        params = {"h": torch.zeros(3, dtype=torch.bfloat16), "f": torch.zeros(3)}
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=sgd())
        grads = {
            "h": torch.full((3,), 1.0 + 2.0 * group.rank, dtype=torch.bfloat16),
            "f": torch.full((3,), [0.1, 0.3][group.rank]),
        }
        optimizer.step(grads)
        assert (params["h"].dtype, params["f"].dtype) == (torch.bfloat16, torch.float32)
        state = optimizer.state_dict()
        assert state["weight"]["h"].dtype == np.float32
        return optimizer.gradient("h").tolist(), optimizer.gradient("f")

    for h, f in on_ranks(2, body):
        assert h == [2.0] * 3
        np.testing.assert_allclose(f, 0.2, atol=1e-7, rtol=0)


# ---- mixed precision ----


@STAGES
@pytest.mark.parametrize("offload", [False, True])
def test_o_mp_01_overflow_on_one_rank(stage, offload):
    def body(group):
        params = scalars("a", "b", dtype=np.float16, value=1.0)
        scaler = pr.LossScaler(initial=2.0)
        optimizer = pr.ShardedOptimizer(
            params, group, stage=stage, rule=pr.AdamW(lr=0.1), loss_scaler=scaler, offload=offload
        )
        bad = np.inf if group.rank == 1 else 1.0
        stats = optimizer.step({"a": ones(1, np.float16), "b": ones(bad, np.float16)})
        assert stats.skipped
        assert "gradient of 'b' is not finite on rank 1" in stats.overflow
        assert (scaler.scale, optimizer.applied_steps, optimizer.updates()) == (1.0, 0, {"a": 0, "b": 0})
        assert float(params["a"][0]) == float(params["b"][0]) == 1.0
        grad = ones(scaler.scale, np.float16)
        assert not optimizer.step({"a": grad, "b": grad}).skipped
        return float(params["b"][0])

    assert on_ranks(2, body) == [float(np.float16(np.float32(1) - np.float32(0.1)))] * 2


@DPS
def test_o_mp_02_the_scale_is_saved(dp):
    def make(group):
        params = {"w": np.ones(3, np.float16)}
        scaler = pr.LossScaler(initial=1024, interval=8)
        return params, scaler, pr.ShardedOptimizer(params, group, rule=pr.AdamW(lr=0.1), loss_scaler=scaler)

    def steps(scaler, optimizer, count):
        scales = []
        for _ in range(count):
            optimizer.step({"w": np.full(3, 0.5 * scaler.scale, np.float16)})
            scales.append(scaler.scale)
        return scales

    def body(group):
        params, scaler, optimizer = make(group)
        steps(scaler, optimizer, 10)
        _, first_scaler, first = make(group)
        steps(first_scaler, first, 5)
        later, later_scaler, second = make(group)
        second.load_state_dict(first.state_dict())
        assert later_scaler.state_dict() == {"scale": 1024, "good_steps": 5, "hysteresis_left": 1}
        assert steps(later_scaler, second, 5) == [1024, 1024, 2048, 2048, 2048]
        assert later["w"].tobytes() == params["w"].tobytes()

    on_ranks(dp, body)


def test_o_mp_03_many_skipped_steps_at_the_start():
    lrs = []

    def body(group):
        scaler = pr.LossScaler(initial=2.0**24, interval=1000)
        rule = pr.SGD(lr=lambda step: 0.01 * step)
        optimizer = pr.ShardedOptimizer(scalars("w", dtype=np.float16), group, rule=rule, loss_scaler=scaler)
        skipped = 0
        for _ in range(12):
            with np.errstate(over="ignore"):
                grad = np.float32([scaler.scale]).astype(np.float16)
            stats = optimizer.step({"w": grad})
            skipped += stats.skipped
            if not stats.skipped:
                lrs.append(stats.lr)
        return skipped, scaler.scale, optimizer.applied_steps, optimizer.updates()

    assert on_ranks(1, body) == [(9, 32768.0, 3, {"w": 3})]
    assert lrs == [0.01, 0.02, 0.03]


def test_o_mp_04_growth_interval():
    scaler = pr.LossScaler(initial=4, growth=2, interval=3)
    scales = []
    for overflowed in (False, False, True, False, False, False, False):
        scaler.update(overflowed)
        scales.append(scaler.scale)
    assert scales == [4, 4, 2, 2, 2, 4, 4]

    def body(group):
        optimizer = pr.ShardedOptimizer(
            scalars("w", dtype=np.float16), group, rule=sgd(), loss_scaler=pr.LossScaler(interval=1)
        )
        for _ in range(400):
            assert not optimizer.step({"w": ones(0, np.float16)}).skipped
        return optimizer.loss_scale

    assert on_ranks(1, body) == [2.0**24]


@pytest.mark.torch
@STAGES
@DPS
def test_o_mp_05_accumulation_is_in_fp32(stage, dp):
    torch = pytest.importorskip("torch")

    def body(group):
        optimizer = pr.ShardedOptimizer(
            {"w": torch.zeros(1, dtype=torch.bfloat16)}, group, stage=stage, rule=sgd()
        )
        grad = {"w": torch.ones(1, dtype=torch.bfloat16)}
        for _ in range(511):
            optimizer.accumulate(grad)
        optimizer.step(grad)
        return float(optimizer.gradient("w")[0])

    assert on_ranks(dp, body) == [1.0] * dp


@STAGES
@pytest.mark.parametrize("value", [10000.0, 2.0**-24])
@pytest.mark.parametrize("gradient_dtype", ["fp32", "fp16"])
def test_o_mp_06_fp16_gradients_are_reduced_in_fp32(stage, value, gradient_dtype):
    def body(group):
        optimizer = pr.ShardedOptimizer(
            scalars("w", dtype=np.float16),
            group,
            stage=stage,
            rule=sgd(),
            loss_scaler=pr.LossScaler.static(1),
            gradient_dtype=gradient_dtype,
        )
        stats = optimizer.step({"w": ones(value, np.float16)})
        return float(optimizer.gradient("w")[0]), stats.skipped

    assert on_ranks(8, body) == [(value, False)] * 8


def test_o_mp_07_clipping_is_at_the_boundary():
    def body(group):
        params = scalars("w", dtype=np.float16)
        optimizer = pr.ShardedOptimizer(
            params, group, rule=sgd(), clip_norm=1.0, loss_scaler=pr.LossScaler(initial=1024)
        )
        optimizer.accumulate({"w": ones(3 * 1024, np.float16)})
        stats = optimizer.step({"w": ones(5 * 1024, np.float16)})
        assert (stats.grad_norm, float(params["w"][0])) == (4.0, -1.0)
        # An epoch that ends inside a window: the step divides by what there was.
        optimizer.step({"w": ones(3 * 1024, np.float16)})
        assert float(optimizer.gradient("w")[0]) == 3.0

    on_ranks(1, body)


def test_o_mp_08_the_scale_is_constant_inside_a_window():
    def body(group):
        params = scalars("w", dtype=np.float16)
        scaler = pr.LossScaler(initial=8, interval=1)
        optimizer = pr.ShardedOptimizer(params, group, rule=sgd(), loss_scaler=scaler)
        seen = []
        for _ in range(3):
            scale = scaler.scale
            for grad in (1, 2, 3):
                optimizer.accumulate({"w": ones(grad * scale, np.float16)})
                assert scaler.scale == scale
            optimizer.step({"w": ones(4 * scale, np.float16)})
            seen.append((float(params["w"][0]), scaler.scale))
        return seen

    assert on_ranks(2, body) == [[(-2.5, 16.0), (-5.0, 32.0), (-7.5, 64.0)]] * 2


@pytest.mark.torch
@pytest.mark.parametrize("hidden", [4, 35])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_o_mp_09_stages_agree(hidden, micro_batches):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(hidden)
    data = rng.normal(size=(5, 8, hidden)).astype(np.float32)
    shapes = {
        "layer.weight": (hidden, hidden),
        "layer.bias": hidden,
        "out.weight": (1, hidden),
        "out.bias": 1,
    }
    start = {name: rng.normal(size=shape) / hidden**0.5 for name, shape in shapes.items()}

    def train(group, stage, dtype):
        layer, out = torch.nn.Linear(hidden, hidden).to(dtype), torch.nn.Linear(hidden, 1).to(dtype)
        module = torch.nn.ModuleDict({"layer": layer, "out": out})
        for name, p in module.named_parameters():  # torch's own generator is one for all threads
            p.data = torch.tensor(start[name], dtype=dtype)
        rule = pr.AdamW(lr=1e-3, betas=(0.9, 0.999), eps=1e-4)
        optimizer = pr.ShardedOptimizer(module.named_parameters(), group, stage=stage, rule=rule)
        per_rank = 8 // group.size
        losses = []
        for batch in data:
            own = batch[group.rank * per_rank : (group.rank + 1) * per_rank]
            parts = np.split(own, micro_batches)
            for i, part in enumerate(parts):
                x = torch.tensor(part, dtype=dtype)
                loss = (
                    out(torch.tanh(layer(torch.tanh(layer(x))))).float().square().sum()
                )  # layer is used twice
                loss.backward()
                losses.append(loss.item())
                last = i == len(parts) - 1
                (optimizer.step if last else optimizer.accumulate)(count=len(part))
        return [p.detach().float().numpy().copy() for p in module.parameters()], losses

    for dtype in (torch.float32, torch.bfloat16):
        reference, losses = on_ranks(2, lambda group, dtype=dtype: train(group, 0, dtype))[0]
        for stage in (1, 2):
            for got, same in on_ranks(2, lambda group, dtype=dtype, stage=stage: train(group, stage, dtype))[
                :1
            ]:
                assert same == losses
                assert all(np.array_equal(a, b) for a, b in zip(got, reference, strict=True))
        if dtype == torch.float32:
            ((alone, _),) = on_ranks(1, lambda group, dtype=dtype: train(group, 1, dtype))
            for a, b in zip(alone, reference, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- steps ----


@pytest.mark.torch
@STAGES
@DPS
def test_o_op_01_step_counter_and_bias_correction(stage, dp):
    torch = pytest.importorskip("torch")

    def body(group):
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
        params = {f"p{i}": torch.zeros(1, dtype=dtype) for i, dtype in enumerate(dtypes)}
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=pr.AdamW(lr=0.1))
        for step in range(1, 4):
            optimizer.step({name: torch.ones(1, dtype=p.dtype) for name, p in params.items()})
            for name, p in params.items():
                weight = optimizer.weight(name)
                assert weight[0] == pytest.approx(-0.1 * step, abs=1e-6)
                assert p[0] == torch.tensor(weight[0]).to(p.dtype)
        assert optimizer.updates() == dict.fromkeys(params, 3)

    on_ranks(dp, body)


@STAGES
@DPS
def test_o_op_02_the_counter_does_not_advance_on_a_skipped_step(stage, dp):
    def body(group):
        params = scalars("w", dtype=np.float16)
        scaler = pr.LossScaler(initial=1024)
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=pr.AdamW(lr=0.1), loss_scaler=scaler)
        seen = []
        for grad in (1.0, math.inf, 1.0):
            optimizer.step({"w": ones(grad * scaler.scale, np.float16)})
            seen.append((float(params["w"][0]), float(optimizer.weight("w")[0])))
        assert [low for low, _ in seen] == pytest.approx([-0.1, -0.1, -0.2], abs=1e-3)
        assert [master for _, master in seen] == pytest.approx([-0.1, -0.1, -0.2], abs=1e-6)
        assert optimizer.updates() == {"w": 2}

    on_ranks(dp, body)


@DPS
def test_o_op_03_counter_per_parameter(dp):
    def make(group):
        params = scalars("A", "B")
        return params, pr.ShardedOptimizer(params, group, rule=pr.AdamW(lr=0.1))

    def body(group):
        params, optimizer = make(group)
        optimizer.step({"A": ones(), "B": ones()})
        optimizer.step({"A": ones()})
        later, loaded = make(group)
        loaded.load_state_dict(optimizer.state_dict())
        for who, name in ((optimizer, params), (loaded, later)):
            who.step({"A": ones(), "B": ones()})
            assert float(name["A"][0]) == pytest.approx(-0.3, abs=1e-6)
            assert float(name["B"][0]) == pytest.approx(-0.2, abs=1e-6)

    on_ranks(dp, body)


@STAGES
@pytest.mark.parametrize("by_name", [False, True])
def test_o_op_04_decay_groups(stage, by_name):
    def body(group):
        params = {
            "weight": np.ones((3, 3), np.float32),
            "bias": np.ones(3, np.float32),
            "norm": np.ones(3, np.float32),
        }
        decay = (
            {"weight_decay_rules": {"weight": 0.1, "bias": 0.0, "norm": 0.0}}
            if by_name
            else {"weight_decay": 0.1}
        )
        optimizer = pr.ShardedOptimizer(params, group, stage=stage, rule=pr.AdamW(lr=0.1, **decay))
        optimizer.step({name: np.zeros_like(value) for name, value in params.items()})
        np.testing.assert_allclose(params["weight"], 0.99, rtol=1e-6)
        assert np.all(params["bias"] == 1)
        assert np.all(params["norm"] == 1)

    on_ranks(2, body)


@pytest.mark.torch
@STAGES
def test_o_rn_03_replicas_start_from_rank_0(stage):
    torch = pytest.importorskip("torch")

    def body(group):
        generator = torch.Generator().manual_seed(group.rank)
        params = {"w": torch.randn(3, 5, generator=generator), "b": torch.randn(5, generator=generator)}
        buffers = {
            "mean": torch.randn(4, generator=generator),
            "count": torch.tensor([group.rank], dtype=torch.int64),
        }
        pr.ShardedOptimizer(params, group, stage=stage, rule=sgd(), buffers=buffers)
        return [t.numpy().tobytes() for t in (*params.values(), *buffers.values())]

    results = on_ranks(4, body)
    assert results == [results[0]] * 4


@pytest.mark.torch
@STAGES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_o_tw_04_a_module_that_is_called_twice(stage, dtype):
    torch = pytest.importorskip("torch")

    def body(group, twice):
        w = torch.nn.Parameter(torch.full((1,), 3.0, dtype=getattr(torch, dtype)))
        optimizer = pr.ShardedOptimizer({"w": w}, group, stage=stage, rule=sgd(), micro_batches=1)
        optimizer.attach()
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]][group.rank], dtype=w.dtype)
        loss = w * (w * [1.0, 2.0][group.rank]) if twice else (w * x).sum()
        loss.sum().backward()
        optimizer.step()
        return float(optimizer.gradient("w")[0])

    assert on_ranks(2, lambda group: body(group, True)) == [9.0, 9.0]
    assert on_ranks(2, lambda group: body(group, False)) == [5.0, 5.0]
