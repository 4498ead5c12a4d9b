"""`polyreme bench` at tiny sizes: the fields, and equal mathematics of the contenders. No speed."""

from __future__ import annotations

import importlib.util
import json

import polyreme as pr
import pytest
from helpers import HANG_S, polyreme, processes_with
from polyreme.bench import gemm, step, torch_rivals
from polyreme.bench.comm import bench_comm as run_bench_comm
from polyreme.bench.comm import render_comm
from polyreme.bench.contender import Contender
from polyreme.bench.gemm import bench_gemm, render_gemm
from polyreme.bench.mpi_rival import find_open_mpi
from polyreme.bench.optim import render_optim
from polyreme.bench.step import StepOptions, bench_step, render_step
from polyreme.errors import Error, NotAvailable

pytestmark = pytest.mark.mp

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq-len": 16}
SIZE = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
MODEL = pr.models.GPT(**{name.replace("-", "_"): value for name, value in SIZES.items()})
PRODUCTS = [shape[:4] for shape in MODEL.gemm_shapes(2)]
KINDS = {"gemm", "attention", "norm", "elementwise", "embedding", "loss", "optimizer"}


def bench(kind, *options, size=SIZE):
    # Importing PyTorch in several processes, and compiling, may take long.
    done = polyreme("bench", kind, *size, "--json", *options, timeout=5 * HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def bench_comm(*options):
    return bench("comm", "--sizes", "4,4096", "--repeats", 1, *options, size=[])


def test_gemm_json():
    result = bench("gemm", "--batch", 2, "--repeats", 2)
    assert [(row["name"], row["m"], row["n"], row["k"]) for row in result["shapes"]] == PRODUCTS
    assert all(row["gflops"]["polyreme"] > 0 for row in result["shapes"])
    rates = [row["gflops"]["polyreme"] for row in result["shapes"]]
    assert min(rates) <= result["weighted_gflops"]["polyreme"] <= max(rates)
    assert result["threads"] == 1
    assert result["ratio_geomean"] == result["ratio_min"] == {}


def test_gemm_against_numpy(world, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    result = bench_gemm(MODEL, batch=1, threads=1, isa="avx2", repeats=1, against=["numpy"])
    assert set(result["weighted_gflops"]) == {"polyreme", "numpy"}
    assert 0 < result["ratio_min"]["numpy"] <= result["ratio_geomean"]["numpy"]
    assert "avx2" in result["device"]
    table = "\n".join(render_gemm(result))
    assert all(name in table for name, *_ in PRODUCTS)


def test_step_json():
    result = bench("step", "--batch", 2, "--steps", 2)
    run = result["runs"]["polyreme"]
    assert set(result["runs"]) == {"polyreme"}
    assert len(run["seconds"]) == len(run["cpu_seconds"]) == 2
    assert len(run["loss"]) == 3
    assert set(run["breakdown_s"]) >= KINDS
    assert all(seconds > 0 for seconds in run["breakdown_s"].values())
    assert sum(run["breakdown_s"].values()) <= sum(run["seconds"]) * 1.001
    assert run["num_parameters"] == sum(_size(spec["shape"]) for spec in MODEL.param_specs())
    assert min(run["tokens_per_s"], run["gflops"], run["share_of_sgemm"], run["peak_rss_bytes"]) > 0
    assert result["model"]["hidden"] == 32


def test_gemm_rivals_warm_up_before_every_timed_product(monkeypatch):
    calls = []

    def rival(*sizes):
        return lambda: calls.append("theirs")

    time_gemm = gemm._core.time_gemm
    monkeypatch.setitem(gemm.RIVALS, "torch", rival)
    monkeypatch.setattr(
        gemm._core, "time_gemm", lambda *args, **sizes: (calls.append("ours"), time_gemm(*args, **sizes))[1]
    )
    bench_gemm(MODEL, batch=1, threads=1, isa="auto", repeats=2, against=["torch"])
    assert calls == 2 * len(PRODUCTS) * ["ours", "theirs", "theirs"]


def test_short_kinds_are_shown_with_their_digits():
    run = {
        "seconds": [1e-3],
        "cpu_seconds": [1e-3],
        "loss": [4.0],
        "tokens_per_s": 1.0,
        "gflops": 1.0,
        "share_of_sgemm": 0.5,
        "peak_rss_bytes": 1,
        "breakdown_s": {"norm": 12e-6},
        "spans": 1,
        "span_cost_s": 1e-8,
    }
    size = {"layers": 1, "hidden": 8, "vocab": 61, "seq_len": 8}
    result = {
        "model": size,
        "batch": 1,
        "micro_batch": 1,
        "threads": 1,
        "ranks": 1,
        "zero": 0,
        "axis": "dp",
        "precision": "fp32",
        "sgemm_gflops": {},
        "runs": {"polyreme": run},
    }
    assert "0.012 ms/step" in "\n".join(render_step({**result, "speed_ratio": {}, "memory_ratio": {}}))


def test_step_without_the_recorder_has_no_breakdown():
    result = bench_step(StepOptions(model=MODEL, batch=1, micro_batch=1, steps=1, record=False))
    assert result["runs"]["polyreme"]["breakdown_s"] == {}
    assert "polyreme" in "\n".join(render_step(result))


@pytest.mark.torch
def test_step_against_torch_has_the_same_losses():
    import reference  # noqa: F401  (skips where PyTorch is missing)

    result = bench("step", "--batch", 3, "--micro-batch", 2, "--steps", 3, "--against", "torch")
    ours, theirs = (result["runs"][name] for name in ("polyreme", "torch"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert len(set(ours["loss"])) == 4
    assert set(theirs) >= {"seconds", "tokens_per_s", "gflops", "share_of_sgemm", "peak_rss_bytes"}
    assert result["speed_ratio"]["torch"] > 0
    assert result["memory_ratio"]["torch"] > 0
    assert set(result["sgemm_gflops"]) == {"polyreme", "torch"}


def test_step_over_ranks_has_the_loss_of_one():
    """Two ranks with a sample each see what one rank with both sees."""
    whole = bench("step", "--batch", 2, "--steps", 1)["runs"]["polyreme"]
    for zero in (0, 1):
        parts = bench("step", "--batch", 1, "--steps", 1, "--ranks", 2, "--zero", zero)
        assert parts["ranks"] == 2
        run = parts["runs"]["polyreme"]
        assert run["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert "collective" in run["breakdown_s"]
        assert run["peak_rss_bytes"] > 0


@pytest.mark.slow
@pytest.mark.torch
def test_step_against_data_parallel_torch():
    import reference  # noqa: F401  (skips where PyTorch is missing)

    rivals = ["torch-ddp", "torch-fsdp"]
    if importlib.util.find_spec("deepspeed") is not None:
        rivals.append("deepspeed")
    more = ["--zero", 1, "--against", ",".join(rivals)]
    result = bench("step", "--batch", 2, "--micro-batch", 1, "--steps", 2, *more)
    assert result["ranks"] == 2
    assert set(result["runs"]) == {"polyreme", *rivals}
    for name in rivals:
        assert result["runs"][name]["loss"] == pytest.approx(result["runs"]["polyreme"]["loss"], rel=1e-4)
        assert result["speed_ratio"][name] > 0
        assert result["memory_ratio"][name] > 0


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("axis, rival", [("pp", "torch-pipelining"), ("tp", "torch-dtensor")])
def test_step_against_pytorchs_other_axes(axis, rival):
    import reference  # noqa: F401  (skips where PyTorch is missing)

    more = ["--axis", axis, "--batch", 2, "--micro-batch", 1, "--steps", 1, "--against", rival]
    result = bench("step", *more)
    losses = {name: run["loss"] for name, run in result["runs"].items()}
    assert losses[rival] == pytest.approx(losses["polyreme"], rel=1e-4)


def test_other_mathematics_is_told(monkeypatch):
    answers = {"polyreme": 4.0, "torch": 4.1}

    class Fake:
        def __init__(self, name, settings):
            self.name = name

        def ask(self, command):
            return [{"loss": answers[self.name], "seconds": 1.0, "cpu_seconds": 1.0}]

        def close(self):
            pass

    monkeypatch.setattr(step, "Contender", Fake)
    monkeypatch.setattr(step, "check_rivals", lambda *args: None)
    with pytest.raises(Error, match=r"first loss of torch is 4.100000, of polyreme 4.000000"):
        bench_step(StepOptions(model=MODEL, against=("torch",)))


def test_a_contender_that_dies_is_told_and_nothing_of_it_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYREME_TEST_CONTENDER", str(tmp_path))
    settings = {"ranks": 2, "threads": 1, "model": {}, "weights": str(tmp_path)}
    with pytest.raises(Error, match=r"'polyreme' \(rank \d\) ended with exit code 1"):
        Contender("polyreme", settings)
    assert not processes_with("POLYREME_TEST_CONTENDER", str(tmp_path))


@pytest.mark.parametrize(
    "against, missing, command",
    [
        ("torch-ddp", "torch", "pip install torch"),
        ("deepspeed", "deepspeed", "DS_ACCELERATOR=cpu pip install deepspeed"),
    ],
)
def test_missing_rivals_are_refused_with_what_installs_them(monkeypatch, against, missing, command):
    monkeypatch.setattr(
        torch_rivals.importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(NotAvailable) as caught:
        StepOptions(model=MODEL, ranks=2, against=(against,))
    assert f"--against {against}" in str(caught.value)
    assert command in str(caught.value)


def test_comm_json():
    result = bench_comm()
    assert result["ranks"] == 2
    assert result["memcpy_gb_s"] > 0
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [
        (op, size) for size in (8, 4096) for op in ops
    ]
    for row in result["rows"]:
        assert set(row["bus_gb_s"]) == set(row["seconds"]) == {"polyreme", "staged", "copy"}
        for who, seconds in row["seconds"].items():
            low, high = row["spread"][who]
            assert 0 < low <= seconds <= high
    assert result["cpus"] >= 1
    assert result["load_average"] >= 0
    table = "\n".join(render_comm(result))
    assert all(op in table for op in ops)
    assert "bytes are those measured" in table


@pytest.mark.torch
def test_comm_against_gloo():
    import reference  # noqa: F401  (skips where PyTorch is missing)

    for row in bench_comm("--against", "gloo")["rows"]:
        assert set(row["seconds"]) == set(row["bus_gb_s"]) == {"polyreme", "staged", "copy", "gloo"}


def test_comm_against_open_mpi():
    try:
        find_open_mpi()
    except NotAvailable as error:
        pytest.skip(str(error))
    result = bench_comm("--against", "mpi")
    for row in result["rows"]:
        assert set(row["seconds"]) == set(row["bus_gb_s"]) == {"polyreme", "staged", "copy", "mpi"}
        assert row["seconds"]["mpi"] > 0
    assert "mpi" in "\n".join(render_comm(result))


def test_comm_without_open_mpi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotAvailable, match="libopenmpi-dev"):
        run_bench_comm(ranks=2, sizes=[4], repeats=1, against=["mpi"])


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("gemm", ["--against", "blas"], ["--against blas", "torch, numpy"]),
        ("gemm", ["--isa", "sse"], ["sse", "avx2"]),
        ("gemm", ["--repeats", 0], ["repeats=0", "at least 1"]),
        ("gemm", ["--batch", 0], ["batch=0", "at least 1"]),
        ("gemm", ["--threads", 0], ["threads=0", "1 to 1024"]),
        ("gemm", ["--against", "numpy", "--threads", 3], ["--threads is 3", "OPENBLAS_NUM_THREADS=3"]),
        ("gemm", ["--heads", 5], ["heads=5", "divide"]),
        ("step", ["--isa", "sse"], ["sse", "avx2"]),
        ("step", ["--threads", 0], ["threads=0"]),
        ("step", ["--micro-batch", 0], ["micro_batch=0"]),
        ("step", ["--against", "jax"], ["--against jax", "torch"]),
        ("step", ["--batch", 2, "--micro-batch", 3], ["batch=2", "micro_batch=3"]),
        ("step", ["--steps", 0], ["steps=0"]),
        ("step", ["--ranks", -1], ["ranks=-1", "at least 1"]),
        ("step", ["--precision", "fp16", "--against", "torch"], ["--against torch", "fp32 and bf16", "fp16"]),
        ("step", ["--zero", 4], ["zero=4", "from 0 to 3"]),
        ("step", ["--ranks", 2, "--against", "torch"], ["--against torch", "--ranks 2", "torch-ddp"]),
        ("comm", ["--ranks", 1], ["ranks=1", "2 ranks"]),
        ("comm", ["--sizes", "1k"], ["--sizes 1k", "bytes"]),
        ("comm", ["--against", "nccl"], ["--against nccl", "gloo, mpi"]),
    ],
)
def test_bad_arguments_are_told_in_one_line(kind, options, words):
    done = polyreme("bench", kind, *([] if kind == "comm" else SIZE), *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def _size(shape):
    result = 1
    for dim in shape:
        result *= dim
    return result


def test_optim():
    result = bench("optim", "--count", 4096, "--repeats", 2, size=[])
    assert [row["rule"] for row in result["rules"]] == ["adamw", "sgd", "lion", "lamb", "muon"]
    for row in result["rules"]:
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["triad_gb_per_s"])
        assert row["gb_per_s"] > 0
    assert "adamw" in "\n".join(render_optim(result))


def test_checkpoint_json(tmp_path):
    arguments = ["--mib", 1, "--repeats", 1, "--directory", tmp_path, "--json"]
    done = polyreme("bench", "checkpoint", *arguments, timeout=5 * HANG_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["seconds"]) == {"plain", "polyreme"}
    assert set(result["speed_ratios"]) == {
        "stall_over_memcpy",
        "write_over_plain_write",
        "load_over_plain_read",
        "reload_over_plain_read",
    }
    assert not list(tmp_path.iterdir())
    assert polyreme("bench", "checkpoint", "--against", "tensorflow").returncode == 2
