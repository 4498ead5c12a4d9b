"""ZeRO on arrays of one's own: the same bits in every form, state, memory, refusals."""

from __future__ import annotations

import math
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import refused
from polyreme.testing import run_ranks


def on_ranks(dp, function):
    """function(group) on dp ranks."""
    return run_ranks(dp, lambda world: function(pr.Mesh(world)["dp"]))


def scalars(*names):
    return {name: np.zeros(1, np.float32) for name in names}


def ones():
    return np.ones(1, np.float32)


def sgd():
    return pr.SGD(lr=1.0)


# ---- the same bits in every form ----

SHAPES = {"wte": (40, 30), "h.weight": (35, 70), "h.bias": (70,), "ln": (7,), "h2.weight": (70, 35), "s": ()}
RULES = {
    "adamw": pr.AdamW(lr=1e-2, weight_decay=0.1, eps=1e-4, lr_rules={"h.*": 0.5}),
    "sgd": pr.SGD(lr=1e-2, momentum=0.9),
    "lion": pr.Lion(lr=1e-3, weight_decay=0.1),
    "lamb": pr.LAMB(lr=1e-2, weight_decay=0.1),
    "muon": pr.Muon(lr=1e-2, weight_decay=0.1),
}


def train_lanes(group, rule, *, lanes=4, steps=3, dtype=np.float32, declared=True, **options):
    """`steps` steps of a batch of 8 micro-batches, whoever computes which; the weights' bytes, the norms."""
    rng = np.random.default_rng(11)
    params = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    per_rank = 8 // group.size
    optimizer = pr.ShardedOptimizer(
        params,
        group,
        rule=RULES[rule],
        lanes=lanes,
        micro_batches=per_rank if declared else None,
        clip_norm=1.0,
        **options,
    )
    norms = []
    for _ in range(steps):
        batch = [
            {
                n: (rng.normal(size=s) * 2.0 ** rng.integers(-4, 4, size=s)).astype(dtype)
                for n, s in SHAPES.items()
            }
            for _ in range(8)
        ]
        for i in range(per_rank):
            micro_batch = group.rank * per_rank + i
            grads = batch[micro_batch]
            if micro_batch == 2:
                grads = {name: grad for name, grad in grads.items() if name != "ln"}
            if i < per_rank - 1:
                optimizer.accumulate(grads, count=3)
            else:
                norms.append(optimizer.step(grads, count=3).grad_norm.hex())
    state = optimizer.state_dict()
    kinds = sorted(state["state"])
    return (
        norms,
        [params[name].tobytes() for name in SHAPES],
        [state["state"][kind][name].tobytes() for kind in kinds for name in sorted(state["state"][kind])],
    )


@pytest.mark.parametrize("rule", RULES)
def test_same_bits_for_every_stage_bucket_and_group(rule):
    (reference,) = on_ranks(1, lambda group: train_lanes(group, rule, stage=0))
    forms = [(1, 1, 1), (2, 0, 4000), (2, 1, 1 << 20), (2, 2, 1), (4, 2, 4000), (4, 1, 4000), (4, 0, 1)]
    for dp, stage, bucket_bytes in forms:
        results = on_ranks(
            dp, lambda group, s=stage, b=bucket_bytes: train_lanes(group, rule, stage=s, bucket_bytes=b)
        )
        for result in results:
            assert result[0] == reference[0], (dp, stage, bucket_bytes)
            assert result[1:] == reference[1:], (dp, stage, bucket_bytes)


def test_same_bits_in_float16_with_many_threads_at_once():
    (reference,) = on_ranks(1, lambda group: train_lanes(group, "adamw", stage=0, dtype=np.float16))
    for dp in (2, 4):
        for result in on_ranks(dp, lambda group: train_lanes(group, "adamw", stage=2, dtype=np.float16)):
            assert result == reference


def test_gradients_one_by_one_in_any_order_have_the_same_bits():
    rng = np.random.default_rng(2)
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}

    def body(group, seed):
        params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        optimizer = pr.ShardedOptimizer(
            params, group, stage=2, rule=RULES["adamw"], micro_batches=1, bucket_bytes=5000
        )
        for step in range(3):
            order = (
                list(SHAPES)
                if seed is None
                else list(np.random.default_rng((seed, group.rank, step)).permutation(list(SHAPES)))
            )
            for name in order:
                optimizer.add(str(name), grads[str(name)] * (1 + group.rank))
            optimizer.step()
        return [params[name].tobytes() for name in SHAPES]

    reference = on_ranks(2, lambda group: body(group, None))
    for seed in range(3):
        assert on_ranks(2, lambda group, seed=seed: body(group, seed)) == reference


def test_buckets_are_reduced_while_gradients_still_come():
    def body(world):
        params = {f"w{i}": np.zeros(3000, np.float32) for i in range(4)}
        optimizer = pr.ShardedOptimizer(
            params, pr.Mesh(world)["dp"], stage=2, rule=sgd(), micro_batches=1, bucket_bytes=1
        )
        world._core.record(True)
        for name in ("w3", "w2", "w1"):
            optimizer.add(name, np.ones(3000, np.float32))
        # Three of the four buckets must come through although a gradient is still missing.
        deadline = time.monotonic() + 30
        while sum(span["name"] == "reduce_scatter" for span in world._core.spans()) < 3:
            assert time.monotonic() < deadline, "nothing is reduced before the last gradient has come"
            time.sleep(0.01)
        optimizer.add("w0", np.ones(3000, np.float32))
        optimizer.step()
        return float(params["w0"][0])

    assert run_ranks(2, body) == [-1.0, -1.0]


# ---- state and memory ----


def test_memory_is_divided_by_the_stages():
    def body(group, stage):
        params = {"w": np.zeros(1 << 16, np.float32)}
        return pr.ShardedOptimizer(params, group, stage=stage).persistent_bytes()

    whole = 4 << 16
    for stage, expected in enumerate(
        [
            {"weights": whole, "gradients": whole, "state": 2 * whole},
            {"weights": whole // 4, "gradients": whole, "state": whole // 2},
            {"weights": whole // 4, "gradients": whole // 4, "state": whole // 2},
        ]
    ):
        assert on_ranks(4, lambda group, stage=stage: body(group, stage)) == [expected] * 4


def test_pieces_of_all_ranks_make_the_whole():
    def body(group):
        params = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        optimizer = pr.ShardedOptimizer(params, group, stage=2, rule=RULES["adamw"], bucket_bytes=4000)
        optimizer.step({name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()})
        return optimizer.state_pieces(), optimizer.state_dict()

    results = on_ranks(3, body)
    whole = results[0][1]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        get = lambda state, kind=kind: state[kind] if kind == "weight" else state["state"][kind]  # noqa: E731
        joined = {name: np.full(math.prod(shape), np.nan, np.float32) for name, shape in SHAPES.items()}
        for pieces, _ in results:
            for name, begin, values in get(pieces):
                assert np.all(np.isnan(joined[name][begin : begin + len(values)]))
                joined[name][begin : begin + len(values)] = values
        for name in SHAPES:
            assert joined[name].tobytes() == get(whole)[name].tobytes()


def test_frozen_parameters_stay_and_have_no_state():
    def body(group):
        params = {"emb.w": np.ones((4, 4), np.float32), "w": np.ones((4, 4), np.float32)}
        optimizer = pr.ShardedOptimizer(params, group, stage=2, frozen=["emb.*"], rule=pr.AdamW(lr=0.1))
        refused(pr.InvalidArgument, ["'emb.w'", "frozen"], lambda: optimizer.add("emb.w", params["emb.w"]))
        optimizer.step({"w": np.ones((4, 4), np.float32)})
        assert np.all(params["emb.w"] == 1)
        assert np.all(params["w"] != 1)
        state = optimizer.state_dict()
        assert list(state["weight"]) == list(state["state"]["exp_avg"]) == ["w"]

    on_ranks(2, body)


def test_a_state_that_does_not_fit_is_refused_with_all_reasons():
    def body(group):
        params = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
        optimizer = pr.ShardedOptimizer(params, group, rule=pr.AdamW())
        state = optimizer.state_dict()
        state["weight"]["a"] = np.zeros(4, np.float32)
        del state["state"]["exp_avg"]["b"]
        state["state"]["exp_avg"]["c"] = np.zeros(1, np.float32)
        refused(
            pr.InvalidArgument,
            ["weight of 'a' has shape (4,); expected (3,)", "exp_avg of 'b' is missing", "exp_avg of 'c'"],
            lambda: optimizer.load_state_dict(state),
        )
        assert np.all(params["a"] == 1)
        other = pr.ShardedOptimizer(params, group, rule=pr.SGD())
        refused(pr.InvalidArgument, ["'AdamW'", "'SGD'"], lambda: other.load_state_dict(state))

    on_ranks(1, body)


# ---- refusals ----


def test_wrong_arguments_are_refused_before_anything_is_sent():
    def body(group):
        make = lambda params=None, **options: pr.ShardedOptimizer(  # noqa: E731
            scalars("w") if params is None else params, group, **options
        )
        for words, call in [
            (["stage=3", "stage=2", "Trainer"], lambda: make(stage=3)),
            (["stage=4"], lambda: make(stage=4)),
            (["'w'", "int64"], lambda: make({"w": np.zeros(3, np.int64)})),
            (["'w'", "list"], lambda: make({"w": [1.0]})),
            (["no parameters"], lambda: make({})),
            (["'w' comes twice"], lambda: make([("w", ones()), ("w", ones())])),
            (["frozen", "'x'"], lambda: make(frozen=["x"])),
            (["all parameters are frozen"], lambda: make(frozen=["*"])),
            (["nonfinite='ignore'"], lambda: make(nonfinite="ignore")),
            (["norm_type=0.5"], lambda: make(norm_type=0.5)),
            (["lanes.dp=3"], lambda: make(lanes=3)),
            (["micro_batches=3", "4 lanes"], lambda: make(lanes=4, micro_batches=3)),
            (["rule"], lambda: make(rule="adamw")),
        ]:
            refused(pr.NotAvailable if "stage=3" in words else pr.InvalidArgument, words, call)
        optimizer = make(micro_batches=2)
        for words, call in [
            (["'v'"], lambda: optimizer.add("v", ones())),
            (["'w'", "(2,)"], lambda: optimizer.add("w", np.zeros(2, np.float32))),
            (["'w'", "float64"], lambda: optimizer.add("w", np.zeros(1))),
            (["2 gradients for 1"], lambda: optimizer.accumulate([ones(), ones()])),
        ]:
            refused(pr.InvalidArgument, words, call)
        optimizer.add("w", ones())
        refused(pr.InvalidArgument, ["'w'", "already given"], lambda: optimizer.add("w", ones()))
        optimizer.accumulate({})
        refused(pr.InvalidArgument, ["the last one; call step"], lambda: optimizer.accumulate({"w": ones()}))
        refused(pr.InvalidArgument, ["some micro-batches"], lambda: optimizer.step({"w": ones()}, count=3))
        assert not optimizer.step({"w": ones()}).skipped

    on_ranks(1, body)


def test_ranks_that_differ_are_told_how():
    def shapes(group):
        pr.ShardedOptimizer({"w": np.zeros(3 + group.rank, np.float32)}, group)

    def rates(group):
        optimizer = pr.ShardedOptimizer(scalars("w"), group, rule=pr.SGD(lr=1.0 + group.rank))
        optimizer.step({"w": ones()})

    for words, body in [(["another parameter", "w [3"], shapes), (["another learning rate"], rates)]:
        with pytest.raises(pr.InvalidArgument) as caught:
            on_ranks(2, body)
        for word in words:
            assert word in str(caught.value) or "w [4" in str(caught.value)


def test_a_gradient_that_is_not_finite_stops_the_run_without_a_scaler():
    def body(group):
        params = {"a": np.ones(2, np.float32), "b": np.ones(5, np.float32)}
        optimizer = pr.ShardedOptimizer(params, group, stage=2, rule=pr.AdamW(lr=0.1))
        bad = np.full(5, np.nan if group.rank == 1 else 1.0, np.float32)
        refused(
            pr.NumericError,
            ["gradient of 'b'", "rank 1", "Nothing was updated"],
            lambda: optimizer.step({"a": np.ones(2, np.float32), "b": bad}),
        )
        assert np.all(params["a"] == 1)
        assert np.all(params["b"] == 1)
        optimizer.step({"a": np.ones(2, np.float32), "b": np.ones(5, np.float32)})
        assert optimizer.applied_steps == 1

        patient = pr.ShardedOptimizer(params, group, nonfinite="skip", max_skips=2)
        assert patient.step({"b": bad}).skipped
        refused(pr.NumericError, ["2 time(s) in a row"], lambda: patient.step({"b": bad}))

    on_ranks(2, body)


@pytest.mark.torch
def test_stochastic_rounding_is_unbiased_and_the_same_everywhere():
    torch = pytest.importorskip("torch")
    count, target = 3000, 1 + 2.0**-10  # an eighth of the way from 1 to the next bfloat16

    def body(group, stage, seed=1):
        params = {"v": torch.ones(7, dtype=torch.bfloat16), "w": torch.ones(count, dtype=torch.bfloat16)}
        optimizer = pr.ShardedOptimizer(
            params, group, stage=stage, rule=sgd(), stochastic_rounding=True, seed=seed, bucket_bytes=1
        )
        optimizer.step({"w": torch.full((count,), -(2.0**-10))})
        assert torch.all(params["v"] == 1)
        assert np.all(optimizer.weight("w") == np.float32(target))
        before = params["w"].clone()
        assert optimizer.step({"w": torch.zeros(count)}, count=0).skipped
        assert torch.equal(params["w"], before)
        return before.float().tolist()

    (reference,) = on_ranks(1, lambda group: body(group, 0))
    assert set(reference) == {1.0, 1 + 2.0**-7}
    # Five standard deviations of the mean.
    assert abs(np.mean(reference) - target) < 5 * 2.0**-7 * math.sqrt(0.125 * 0.875 / count)
    for dp, stage in ((2, 0), (2, 1), (3, 2)):
        assert on_ranks(dp, lambda group, stage=stage: body(group, stage)) == [reference] * dp
    assert on_ranks(1, lambda group: body(group, 1, seed=2)) != [reference]


# ---- refusals leave everything as it was ----


def test_a_step_that_comes_too_early_takes_nothing():
    def body(group):
        arrays = scalars("a")
        optimizer = pr.ShardedOptimizer(arrays, group, rule=sgd(), micro_batches=4, lanes=2)
        with pytest.raises(pr.InvalidArgument, match="1 micro-batches, with micro_batches=4"):
            optimizer.step([ones()], count=10)
        for _ in range(3):
            optimizer.accumulate([ones()], count=10)
        with pytest.raises(pr.InvalidArgument, match="3 micro-batches"):
            optimizer.step()
        stats = optimizer.step([ones()], count=10)
        return stats.count, arrays["a"].tolist()

    assert on_ranks(1, body) == [(40, [np.float32(-0.1)])]


def test_refused_gradients_stay_with_the_script():
    torch = pytest.importorskip("torch")

    def body(group):
        module = torch.nn.Linear(2, 1)
        optimizer = pr.ShardedOptimizer(module.named_parameters(), group, rule=sgd(), frozen=["bias"])
        module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(pr.InvalidArgument, match="count=-1"):
            optimizer.step(count=-1)
        assert module.weight.grad is not None
        before = module.weight.detach().clone()
        optimizer.step()
        assert module.weight.grad is None
        assert module.bias.grad is None
        assert torch.equal(module.weight, before - 1)
        optimizer.attach()
        with pytest.raises(pr.InvalidArgument, match="once"):
            optimizer.attach()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert module.bias.grad is None

    on_ranks(1, body)


def test_what_one_rank_refuses_all_ranks_refuse():
    def body(group):
        arrays = scalars("a")
        optimizer = pr.ShardedOptimizer(arrays, group, rule=sgd())
        state = optimizer.state_dict()
        texts = []
        for call in (
            lambda: optimizer.step([ones() if group.rank else np.ones(3, np.float32)]),
            lambda: optimizer.load_state_dict(state if group.rank else {**state, "applied_steps": -1}),
        ):
            with pytest.raises(pr.InvalidArgument) as caught:
                call()
            texts.append(str(caught.value))
        optimizer.step([ones()])
        return texts, float(arrays["a"][0])

    (first, value), (second, _) = on_ranks(2, body)
    assert value == -1.0
    assert "has shape (3,)" in first[0]
    assert "applied_steps=-1" in first[1]
    assert all("dp rank 0 refused this call" in text for text in second)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"updates": None}, "updates"),
        ({"updates": {}}, "updates of 'a' are missing"),
        ({"updates": {"a": -1}}, "updates of 'a'=-1"),
        ({"applied_steps": "x"}, "applied_steps"),
        ({"weight": {"a": np.ones(1, complex)}}, "complex128"),
        ({"state": {"momentum": {}, "other": {}}}, "no other"),
        ({"loss_scaler": {"scale": -1, "good_steps": 0, "hysteresis_left": 1}}, "scale=-1"),
        ({"loss_scaler": 3}, "LossScaler: state"),
    ],
)
def test_a_bad_state_changes_nothing(change, words):
    def body(group):
        arrays = scalars("a")
        optimizer = pr.ShardedOptimizer(
            arrays, group, rule=pr.SGD(lr=1.0, momentum=0.5), loss_scaler=pr.LossScaler()
        )
        optimizer.step([ones()])
        before = str(optimizer.state_dict())
        with pytest.raises(pr.InvalidArgument, match=words):
            optimizer.load_state_dict({**optimizer.state_dict(), **change})
        assert str(optimizer.state_dict()) == before
        with pytest.raises(pr.InvalidArgument, match="lacks"):
            optimizer.load_state_dict({})

    on_ranks(1, body)


def test_arrays_that_cannot_be_written_are_refused():
    read_only = np.ones(3, np.float32)
    read_only.flags.writeable = False
    spread = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (4,), (0,))
    good = np.full(3, 2, np.float32)

    def body(group):
        for array, words in ((read_only, "read-only"), (spread, "broadcast view")):
            for call in (
                lambda: pr.ShardedOptimizer({"a": array}, group),  # noqa: B023
                lambda: pr.ShardedOptimizer({"a": good}, group, buffers={"b": array}),  # noqa: B023
                lambda: pr.clip_grad_norm([good, array], 1.0),  # noqa: B023
            ):
                refused(pr.InvalidArgument, [words], call)
        return good.tolist()

    assert on_ranks(1, body) == [[2.0] * 3]


def test_arrays_that_share_memory_are_refused():
    whole = np.ones((4, 6), np.float32)
    same = {"a": whole, "b": whole}
    overlapping = {"a": whole[:3], "b": whole[2:]}
    columns = {"a": whole[:, :3], "b": whole[:, 3:]}

    def body(group):
        for arrays in (same, overlapping):
            words = ["'a'", "'b'", "share memory"]
            refused(pr.InvalidArgument, words, lambda: pr.ShardedOptimizer(arrays, group))  # noqa: B023
            words = ["array 0", "array 1", "share memory"]
            refused(pr.InvalidArgument, words, lambda: pr.clip_grad_norm(arrays, 1.0))  # noqa: B023
        pr.ShardedOptimizer(columns, group)
        return pr.clip_grad_norm(columns, 0.0)

    assert on_ranks(1, body) == [math.sqrt(24)]


def test_a_tensor_whose_storage_was_freed_is_refused():
    torch = pytest.importorskip("torch")

    def body(group):
        params = {name: torch.nn.Parameter(torch.ones(4)) for name in "ab"}
        optimizer = pr.ShardedOptimizer(params, group, rule=pr.SGD(lr=1.0))
        params["b"].untyped_storage().resize_(0)
        words = ["parameter 'b' has no memory"]
        refused(pr.InvalidArgument, words, lambda: optimizer.step([torch.ones(4), None]))
        return params["a"].tolist(), optimizer.applied_steps

    assert on_ranks(1, body) == [([1.0] * 4, 0)]


def test_skips_in_a_row_are_part_of_the_state():
    def body(group):
        arrays, state = scalars("a"), None
        for _ in range(3):
            options = {"nonfinite": "skip", "max_skips": 3}
            optimizer = pr.ShardedOptimizer(arrays, group, **options)
            if state is not None:
                optimizer.load_state_dict(state)
            bad = [np.full(1, np.nan, np.float32).reshape(arrays["a"].shape)]
            if state is not None and state["skips"] == 2:
                refused(pr.NumericError, ["3 time(s) in a row"], lambda: optimizer.step(bad))  # noqa: B023
                return True
            optimizer.step(bad)
            state = optimizer.state_dict()
        return False

    assert on_ranks(2, body) == [True, True]


def test_buffers_of_any_dtype_start_as_those_of_rank_0():
    def body(group):
        buffers = {
            "complex": np.full(2, 1j + group.rank),
            "uint16": np.full((2, 3), group.rank + 7, np.uint16).T,
            "bool": np.full((), group.rank > 0),
            "empty": np.ones((0, 3)),
        }
        pr.ShardedOptimizer(scalars("a"), group, buffers=buffers)
        differing = {"b": np.ones(2 + group.rank)}
        with pytest.raises(pr.InvalidArgument, match=r"'b': float64\["):
            pr.ShardedOptimizer(scalars("a"), group, buffers=differing)
        return [np.asarray(array).tolist() for array in buffers.values()]

    first, second = on_ranks(2, body)
    assert first == second == [[1j, 1j], [[7, 7]] * 3, False, []]


def test_odd_arguments_of_norms():
    array = np.ones(4, np.float32)
    assert pr.clip_grad_norm([array], 0.0, sharded=np.False_) == 2.0
    words = ["norm_type=1000000.0", "1 to 8"]
    refused(pr.InvalidArgument, words, lambda: pr.clip_grad_norm([array], 1.0, norm_type=1e6))
