"""`pr.init(device="cuda")`: training, checkpoints and collectives from Python on GPUs that are emulated.

The backends of tests/emulator take the place of the real ones (POLYREME_BACKENDS): the same host code and kernels,
with streams that advance in random order. Bits are those of a CPU at avx2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polyreme as pr
import pytest
from helpers import (
    HANG_S,
    Ranks,
    alone,
    batches,
    clean_environment,
    fingerprint,
    json_lines,
    make_trainer,
    refused,
    token_file,
    train,
)
from polyreme.environment import RankEnvironment
from polyreme.testing import run_ranks

# An emulated GPU runs a fiber for each thread of a kernel.
SMALL = dict(layers=2, hidden=8, heads=2, vocab=13, seq_len=6)
LANES = pr.Lanes(dp=2)


def emulated_folder():
    """Where the emulated backends are: POLYREME_EMULATED_GPU, or the build folder of the C++ tests."""
    folder = os.environ.get("POLYREME_EMULATED_GPU")
    return Path(folder) if folder else Path(__file__).parents[2] / "build" / "dev" / "bin" / "emulated"


@pytest.fixture
def gpus(monkeypatch):
    """Emulated GPUs; no rule of CUDA or NCCL may have been broken at the end."""
    library = emulated_folder() / "libpolyreme_cuda.so"
    if not library.exists():
        assert "POLYREME_EMULATED_GPU" not in os.environ, f"no {library}"
        pytest.skip(f"no {library}: cmake --build --preset dev --target polyreme_emulated_backends")
    monkeypatch.setenv("POLYREME_BACKENDS", str(library.parent))
    loaded = ctypes.CDLL(str(library))
    text = ctypes.create_string_buffer(10000)
    before = loaded.polyreme_emulated_violations(text, len(text))
    yield loaded
    assert loaded.polyreme_emulated_violations(text, len(text)) == before, text.value.decode()


def on_cpu(data, model, **options):
    """One rank at avx2."""
    return train(alone(isa="avx2"), data, model, lanes=LANES, **options)


def model_of(**options):
    return pr.models.GPT(**{**SMALL, **options})


# ---- training ----


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_gpu_has_the_bits_of_a_cpu(gpus, precision):
    model = model_of()
    data = batches(2, 4, model)
    options = {"global_batch": 4, "precision": precision, "clip_norm": 1.0}
    assert train(alone(device="cuda"), data, model, lanes=LANES, **options) == on_cpu(data, model, **options)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_with_gpus_have_the_bits_of_a_cpu(gpus, device, zero):
    """Over NCCL with a GPU each ("cuda"), and by way of the host's memory on one ("cuda:0")."""
    model = model_of()
    data = batches(2, 4, model)
    wanted = on_cpu(data, model, global_batch=4)
    ranks = run_ranks(
        2, lambda world: train(world, data, model, lanes=LANES, global_batch=4, zero=zero), device=device
    )
    assert ranks == [wanted, wanted]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_tensor_parallel_ranks(gpus, device):
    """tp=2 and, with the same two lanes, tp=1: the bits of one CPU."""
    model, lanes = model_of(), pr.Lanes(tp=2)
    data = batches(2, 4, model)

    def body(world, tp):
        options = {
            "optimizer": pr.AdamW(lr=1e-3, eps=1e-4),
            "global_batch": 4,
            "lanes": lanes,
            "zero": tp - 1,
        }
        trainer = pr.Trainer(model, pr.Mesh(world, tp=tp), **options)
        return [trainer.step(*batch).loss.hex() for batch in data], fingerprint(trainer)

    wanted = body(alone(isa="avx2"), 1)
    assert run_ranks(2, lambda world: body(world, 2), device=device) == [wanted, wanted]
    assert body(alone(device="cuda"), 1) == wanted


def test_a_llama_on_a_gpu(gpus):
    model = pr.models.Llama(
        layers=1, hidden=8, heads=4, kv_heads=2, mlp_hidden=12, vocab=13, seq_len=6, init_std=0.1
    )
    data = batches(2, 4, model)
    assert train(alone(device="cuda"), data, model, lanes=LANES, global_batch=4) == on_cpu(
        data, model, global_batch=4
    )


@pytest.mark.parametrize("optimizer", [pr.LAMB(lr=1e-2), pr.Muon(lr=1e-2), pr.Lion(lr=1e-3), pr.SGD(lr=1e-2)])
def test_every_optimizer_in_shards_of_two_gpus(gpus, optimizer):
    model = model_of()
    data = batches(2, 4, model)

    def body(world, zero):
        trainer = make_trainer(world, model, lanes=LANES, global_batch=4, zero=zero, optimizer=optimizer)
        count = 4 // world.size
        part = slice(world.rank * count, (world.rank + 1) * count)
        losses = [trainer.step(tokens[part], targets[part]).loss.hex() for tokens, targets in data]
        return losses, [trainer.parameter(name).tobytes() for name in trainer.parameter_names()]

    wanted = body(alone(isa="avx2"), 0)
    assert run_ranks(2, lambda world: body(world, 2), device="cuda") == [wanted, wanted]


def test_fit_evaluate_and_logits(gpus, tmp_path):
    model = model_of()
    tokens = token_file(tmp_path, np.random.default_rng(3).integers(0, model.vocab, 400), model.vocab)

    def results(world):
        data = pr.data.TokenDataset(tokens, seq_len=model.seq_len)
        trainer = make_trainer(world, model, lanes=LANES, global_batch=4)
        losses = [stats.loss.hex() for stats in trainer.fit(data, steps=2)]
        prompt = np.arange(6, dtype=np.int32)[None]
        return losses, trainer.evaluate(data, num_samples=4), trainer.logits(prompt).tobytes()

    assert results(alone(device="cuda")) == results(alone(isa="avx2"))


PROCESS = """
import json, sys
sys.path.insert(0, {here!r})
import polyreme as pr
from helpers import batches, train
from test_gpu import LANES, model_of
model = model_of()
world = pr.init(device="cuda", transport="shm")
history, digest = train(world, batches(2, 4, model), model, lanes=LANES, global_batch=4, zero=2)
print(json.dumps({{"history": history, "digest": digest, "device": world.device}}))
"""


@pytest.mark.mp
def test_processes_with_gpus_have_the_bits_of_a_cpu(gpus):
    model = model_of()
    history, digest = on_cpu(batches(2, 4, model), model, global_batch=4)
    script = PROCESS.format(here=str(Path(__file__).parent))
    with Ranks([script, script], POLYREME_BACKENDS=str(emulated_folder())) as ranks:
        for rank in range(2):
            code, (told,), errors = ranks.end(rank)
            assert code == 0, errors
            assert told["digest"] == digest
            assert told["history"] == [list(step) for step in history]
            assert told["device"].startswith(f"cuda:{rank}, emulated GPU")


BREAKS = """
import ctypes, json, sys
sys.path.insert(0, {here!r})
import polyreme as pr
from helpers import batches, local_part, make_trainer
from test_gpu import LANES, model_of
world = pr.init(device="cuda", transport="shm")
model = model_of()
trainer = make_trainer(world, model, lanes=LANES, global_batch=4, zero=3)
try:
    for step, (tokens, targets) in enumerate(batches(3, 4, model)):
        if step == 1 and world.rank == 1:
            ctypes.CDLL({library!r}).polyreme_emulated_break_gpu(1)
        trainer.step(local_part(world, tokens), local_part(world, targets))
except pr.Error as error:
    print(json.dumps({{"error": type(error).__name__, "text": str(error)}}), flush=True)
    raise
"""


@pytest.mark.mp
def test_g1_an_illegal_address_ends_both_ranks(gpus):
    """The rank of the broken GPU says so, the other one names it."""
    script = BREAKS.format(
        here=str(Path(__file__).parent), library=str(emulated_folder() / "libpolyreme_cuda.so")
    )
    with Ranks([script, script], POLYREME_BACKENDS=str(emulated_folder())) as ranks:
        ended = [ranks.end(rank) for rank in (1, 0)]
    (broken,), (survivor,) = ended[0][1], ended[1][1]
    assert broken["error"] == "DeviceError"
    assert "cuda:1" in broken["text"]
    assert "cudaErrorIllegalAddress" in broken["text"]
    assert survivor["error"] == "PeerLost"
    assert "rank 1" in survivor["text"]
    assert all(code == 1 for code, _, _ in ended)


# ---- checkpoints ----


def test_a_run_goes_on_on_another_kind_of_device(gpus, tmp_path):
    """Saved on a GPU, resumed on a CPU, and the other way round, with the bits of a run that was never stopped."""
    model = model_of()
    data = batches(4, 4, model)

    def run(world, name, batch_range):
        trainer = make_trainer(world, model, lanes=LANES, global_batch=4, zero=1)
        with pr.Checkpointer(tmp_path / name) as checkpoints:
            trainer.resume(checkpoints)
            for tokens, targets in data[batch_range]:
                trainer.step(tokens, targets)
            checkpoints.save(trainer)
        return fingerprint(trainer)

    def gpu():
        return alone(device="cuda")

    def cpu():
        return alone(isa="avx2")

    wanted = run(cpu(), "whole", slice(0, 4))
    run(gpu(), "gpu first", slice(0, 2))
    assert run(cpu(), "gpu first", slice(2, 4)) == wanted
    run(cpu(), "cpu first", slice(0, 2))
    assert run(gpu(), "cpu first", slice(2, 4)) == wanted


def test_shards_of_two_gpus_load_on_one(gpus, tmp_path):
    model = model_of()
    data = batches(2, 4, model)

    def save(world):
        trainer = make_trainer(world, model, lanes=LANES, global_batch=4, zero=3)
        for tokens, targets in data:
            part = slice(2 * world.rank, 2 * world.rank + 2)
            trainer.step(tokens[part], targets[part])
        with pr.Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(trainer)
        return fingerprint(trainer)

    wanted = run_ranks(2, save, device="cuda")[0]
    loaded = make_trainer(alone(device="cuda"), model, lanes=LANES, global_batch=4)
    with pr.Checkpointer(tmp_path) as checkpoints:
        loaded.resume(checkpoints)
    assert fingerprint(loaded) == wanted


# ---- arrays of a script ----


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_collectives_on_arrays_of_the_host(gpus, device):
    def body(world):
        group = pr.Mesh(world)["dp"]
        own = np.arange(4, dtype=np.float32) + world.rank
        total = group.all_reduce(own)
        assert group.all_reduce(own, out=own, wait=False).wait() is own
        gathered = group.all_gather(np.full((world.rank + 1, 2), world.rank, np.int32), rows=[1, 2])
        part = group.reduce_scatter(np.ones((2, 3), np.float64))
        root = np.full(3, world.rank, np.uint8)
        group.broadcast(root, root=1)
        group.barrier()
        return [array.tolist() for array in (total, own, gathered, part, root)]

    total = [1.0, 3.0, 5.0, 7.0]
    wanted = [total, total, [[0, 0], [1, 1], [1, 1]], [[2.0, 2.0, 2.0]], [1, 1, 1]]
    assert run_ranks(2, body, device=device) == [wanted, wanted]


def test_what_a_refused_call_would_have_written_is_left_alone(gpus):
    world = alone(device="cuda")
    group = pr.Mesh(world)["dp"]
    first = np.zeros(3, np.float32)
    with pytest.raises(pr.InvalidArgument):
        group.exchange(receives=[(first, 0), (np.zeros(3, complex), 0)])
    later = group.all_reduce(np.ones(2), wait=False)
    group.all_reduce(np.ones(2))  # whatever is before it on the stream has run
    first[:] = 7
    later.wait()
    assert first.tolist() == [7, 7, 7]


def test_arrays_in_a_checkpoint_of_a_gpu_run(gpus, tmp_path):
    world = alone(device="cuda")
    with pr.Checkpointer(tmp_path, world=world) as checkpoints:
        checkpoints.save({"moment": np.arange(5.0)}, step=1)
        back = {"moment": np.zeros(5)}
        checkpoints.load(back)
    assert back["moment"].tolist() == [0, 1, 2, 3, 4]


# ---- the script for real GPUs ----


def test_the_script_for_real_gpus_runs(gpus):
    script = Path(__file__).parents[2] / "scripts" / "gpu_step.py"
    if not script.exists():
        pytest.skip("away from the sources")
    environment = clean_environment(POLYREME_BACKENDS=str(emulated_folder()))
    command = [sys.executable, str(script), "--tiny", "--steps", "1"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json_lines(done.stdout)
    assert {line["outcome"] for line in lines} == {"ok"}
    assert lines[-1]["model_step"] == "tiny"


# ---- what is refused ----


def test_offload_is_refused(gpus):
    options = {"zero": pr.Zero(stage=1, offload=True)}
    refused(
        pr.NotAvailable,
        ["offload", "cuda:0", "device='cpu'"],
        lambda: make_trainer(alone(device="cuda"), model_of(), **options),
    )


def test_a_gpu_that_is_not_there(gpus):
    refused(pr.NotAvailable, ["cuda:7", "sees 2 GPUs"], lambda: alone(device="cuda:7"))
    refused(pr.InvalidArgument, ["executor", "deferred"], lambda: alone(device="cuda", executor="deferred"))


def test_ranks_take_the_gpus_in_turn(gpus):
    def device_of(local_rank):
        environment = RankEnvironment(local_rank=local_rank, local_size=4)
        return pr.init(device="cuda", environment=environment).device.split(",")[0]

    assert [device_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
