"""`polyreme bench` at tiny sizes: the fields, and equal mathematics of the contenders. No speed."""

from __future__ import annotations

import json

import polyreme as pr
import pytest
from helpers import polyreme
from polyreme.bench import gemm
from polyreme.bench.comm import bench_comm as run_bench_comm
from polyreme.bench.comm import render_comm
from polyreme.bench.gemm import bench_gemm, render_gemm
from polyreme.bench.mpi_rival import find_open_mpi
from polyreme.bench.step import bench_step, render_step
from polyreme.errors import NotAvailable

pytestmark = pytest.mark.mp

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq-len": 16}
SIZE = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
MODEL = pr.models.GPT(**{name.replace("-", "_"): value for name, value in SIZES.items()})
PRODUCTS = [shape[:4] for shape in MODEL.gemm_shapes(2)]
KINDS = {"gemm", "attention", "norm", "elementwise", "embedding", "loss", "optimizer"}


def bench(kind, *options, size=SIZE):
    done = polyreme("bench", kind, *size, "--json", *options)
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
    assert len(run["seconds"]) == 2
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
        "sgemm_gflops": {},
        "runs": {"polyreme": run},
    }
    assert "0.012 ms/step" in "\n".join(render_step({**result, "speed_ratio": {}, "memory_ratio": {}}))


def test_step_without_the_recorder_has_no_breakdown():
    result = bench_step(
        MODEL, batch=1, micro_batch=1, threads=1, isa="auto", steps=1, against=[], record=False
    )
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


def test_comm_json():
    result = bench_comm()
    assert result["ranks"] == 2
    assert result["memcpy_gb_s"] > 0
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [
        (op, size) for size in (8, 4096) for op in ops
    ]
    for row in result["rows"]:
        assert set(row["bus_gb_s"]) == set(row["seconds"]) == {"polyreme", "staged"}
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
        assert set(row["seconds"]) == set(row["bus_gb_s"]) == {"polyreme", "staged", "gloo"}


def test_comm_against_open_mpi():
    try:
        find_open_mpi()
    except NotAvailable as error:
        pytest.skip(str(error))
    result = bench_comm("--against", "mpi")
    for row in result["rows"]:
        assert set(row["seconds"]) == set(row["bus_gb_s"]) == {"polyreme", "staged", "mpi"}
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
