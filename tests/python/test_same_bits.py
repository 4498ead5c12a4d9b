"""The promise: loss, gradient norm, weights and optimizer state do not depend on the layout."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import polyreme as pr
import pytest
from helpers import TINY, batches, train
from polyreme import _core
from polyreme.testing import run_ranks

MODEL = pr.models.GPT(**TINY)
DATA = batches(4, 8, MODEL, ignored=0.1)


@functools.cache
def one_rank(lanes, tied=True, dropout=0.0):
    model = pr.models.GPT(**TINY, tied=tied, dropout=dropout)
    return run_ranks(1, lambda world: train(world, DATA, model, lanes=pr.Lanes(dp=lanes), clip_norm=0.5))[0]


def many(size, lanes, *, model=MODEL, executor="immediate", seed=0, isa="auto", num_threads=1, **options):
    results = run_ranks(
        size,
        lambda world: train(world, DATA, model, lanes=pr.Lanes(dp=lanes), clip_norm=0.5, **options),
        executor=executor,
        schedule_seed=seed,
        isa=isa,
        num_threads=num_threads,
    )
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@pytest.mark.parametrize("dp, lanes", [(1, 8), (2, 2), (2, 8), (4, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_micro_batches_and_zero(dp, lanes, micro_batch, zero):
    assert many(dp, lanes, micro_batch=micro_batch, zero=zero) == one_rank(lanes)


def test_llama():
    model = pr.models.Llama(layers=2, hidden=32, heads=4, kv_heads=2, vocab=61, seq_len=24)
    options = dict(lanes=pr.Lanes(dp=4), clip_norm=0.5)
    one = run_ranks(1, lambda world: train(world, DATA, model, **options))[0]
    assert many(2, 4, model=model, micro_batch=3, zero=1) == one
    assert many(4, 4, model=model, executor="deferred", num_threads=2) == one


def test_lanes_do_change_the_bits():
    assert one_rank(1)[1] != one_rank(8)[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", [True, False, "attention"])
def test_tied_dropout_recompute(tied, dropout, recompute):
    model = pr.models.GPT(**TINY, tied=tied, dropout=dropout, recompute=recompute)
    assert many(2, 4, model=model, micro_batch=2) == one_rank(4, tied, dropout)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_instruction_set_levels(isa):
    if isa not in _core.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    assert many(1, 4, isa=isa, micro_batch=4) == one_rank(4)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads(num_threads):
    assert many(1, 4, num_threads=num_threads, micro_batch=2) == one_rank(4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("zero", [0, 1])
def test_deferred_executor(seed, zero):
    assert many(2, 4, executor="deferred", seed=seed, micro_batch=2, zero=zero) == one_rank(4)


def test_deferred_executor_with_dropout_and_recompute():
    model = pr.models.GPT(**TINY, dropout=0.1, recompute=True)
    assert many(1, 4, model=model, executor="deferred", micro_batch=2) == one_rank(4, True, 0.1)


@pytest.mark.parametrize("size, zero", [(2, 0), (2, 1), (4, 1)])
def test_processes(size, zero, tmp_path):
    """Real processes over shared memory against the one-rank run."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, polyreme as pr\n"
        "from helpers import TINY, batches, train\n"
        "model = pr.models.GPT(**TINY)\n"
        "world = pr.init()\n"
        f"assert world.size == {size}\n"
        f"options = dict(lanes=pr.Lanes(dp=4), clip_norm=0.5, zero={zero})\n"
        "result = train(world, batches(4, 8, model, ignored=0.1), model, **options)\n"
        "print('RESULT', result, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-m", "polyreme", "run", "-n", str(size), "--prefix", "never", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [f"RESULT {one_rank(4)}"] * size
