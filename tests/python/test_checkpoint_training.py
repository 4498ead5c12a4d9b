"""A training that is stopped and goes on, on another layout: the same bits as one that never stopped."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, alone, clean_environment, python_corpus, refused
from polyreme.checkpoint import CheckpointFiles, complete_steps, read_manifest
from polyreme.testing import run_ranks

STEPS, BATCH = 5, 8
FULL = os.environ.get("POLYREME_TEST_FULL") == "1"
MODEL = {**TINY, "vocab": 257}


def trainer_of(world, **options):
    options.setdefault(
        "optimizer", pr.AdamW(lr=pr.lr.warmup_cosine(peak=1e-2, warmup=2, total=6), weight_decay=0.1)
    )
    options.setdefault("model", MODEL)
    options.setdefault("lanes", pr.Lanes(dp=8))
    model = pr.models.GPT(**options.pop("model"))
    mesh = pr.Mesh(world, pp=options.pop("pp", 1))
    return pr.Trainer(model, mesh, global_batch=BATCH, clip_norm=1.0, **options)


def dataset(tmp_path_factory):
    return python_corpus(tmp_path_factory.getbasetemp())


def bits_of(trainer):
    """A hash of all weights and state; frozen parameters have none."""
    digest = hashlib.sha256()
    for name in trainer.parameter_names():
        digest.update(trainer.parameter(name).tobytes())
        for kind in ("exp_avg", "exp_avg_sq") if name not in trainer.frozen else ():
            digest.update(trainer.optimizer_state(name, kind).tobytes())
    return digest.hexdigest()


def train(folder, corpus, ranks, steps, *, every=None, resume=False, **options):
    """Trains up to `steps`; returns (losses and norms of the steps that ran, the bits at the end)."""

    def body(world):
        trainer = trainer_of(world, **options)
        data = pr.data.TokenDataset(corpus, seq_len=MODEL["seq_len"])
        history = []
        with pr.Checkpointer(folder, every=every) as checkpoints:
            if resume:
                trainer.resume(checkpoints, must_exist=True)
            for stats in trainer.fit(data, steps=steps, checkpoints=checkpoints):
                history.append((stats.step, stats.loss.hex(), stats.grad_norm.hex(), stats.lr))
        return history, bits_of(trainer)

    results = run_ranks(ranks, body)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Never stopped, on one rank."""
    corpus = dataset(tmp_path_factory)
    return train(tmp_path_factory.mktemp("whole"), corpus, 1, STEPS), corpus


LAYOUTS = [(1, 0), (2, 1), (4, 2), (2, 3), (8, 3)] if FULL else [(1, 0), (2, 1), (4, 3)]
PAIRS = (
    [(a, b) for a in LAYOUTS for b in LAYOUTS]
    if FULL
    else [(LAYOUTS[0], b) for b in LAYOUTS[1:]]
    + [(a, LAYOUTS[0]) for a in LAYOUTS[1:]]
    + [(LAYOUTS[1], LAYOUTS[2])]
)


@pytest.mark.parametrize("first, second", PAIRS)
def test_o_rs_05_o_dl_07_stopped_and_resumed_elsewhere(whole_run, tmp_path, first, second):
    (history, bits), corpus = whole_run
    head, _ = train(tmp_path, corpus, first[0], 2, zero=first[1])
    tail, resumed = train(tmp_path, corpus, second[0], STEPS, resume=True, zero=second[1])
    assert head + tail == history
    assert resumed == bits
    files = CheckpointFiles(str(tmp_path), 2)
    elements = sum(t.num_elements for n, t in files.manifest.tensors.items() if n.startswith("optimizer/"))
    parameters = sum(t.num_elements for n, t in files.manifest.tensors.items() if n.startswith("model/"))
    assert elements == 2 * parameters
    assert sum(f.data_bytes for f in files.files) == 4 * (elements + parameters)


UNTIED = {**MODEL, "layers": 3, "tied": False}


@pytest.mark.parametrize(
    "first, second, frozen",
    [
        ((2, 2, 0), (1, 1, 0), ()),
        ((1, 1, 0), (4, 2, 1), ()),
        ((2, 2, 0), (3, 3, 0), ()),
        ((4, 2, 2), (2, 1, 3), ()),
        ((2, 1, 1), (4, 1, 3), ("wte.*", "h.0.*")),
    ],
)
def test_o_rs_02_o_rs_03_pipelines_and_frozen_parameters(whole_run, tmp_path, first, second, frozen):
    """Stages of any number: (ranks, pp, zero)."""
    options = dict(model=UNTIED, frozen=frozen)
    _, corpus = whole_run
    history, bits = train(tmp_path / "whole", corpus, 1, 4, **options)
    head, _ = train(tmp_path / "run", corpus, first[0], 2, pp=first[1], zero=first[2], **options)
    tail, resumed = train(
        tmp_path / "run", corpus, second[0], 4, resume=True, pp=second[1], zero=second[2], **options
    )
    assert head + tail == history
    assert resumed == bits


def test_o_dl_03_saved_again_right_after_a_resume(whole_run, tmp_path):
    (history, bits), corpus = whole_run
    train(tmp_path, corpus, 2, 2)
    for step in (2, 3):  # no step, one step, then the rest
        train(tmp_path, corpus, 1, step, resume=True)
    tail, resumed = train(tmp_path, corpus, 2, STEPS, resume=True)
    assert (tail, resumed) == (history[3:], bits)


def test_every_and_fresh_start(whole_run, tmp_path, caplog):
    (history, _), corpus = whole_run

    def body(world):
        trainer = trainer_of(world)
        data = pr.data.TokenDataset(corpus, seq_len=MODEL["seq_len"])
        with pr.Checkpointer(tmp_path, every=2, keep=10) as checkpoints:
            refused(
                pr.CheckpointError,
                ["no committed checkpoint"],
                lambda: trainer.resume(checkpoints, must_exist=True),
            )
            assert trainer.resume(checkpoints) is None
            return [s.loss.hex() for s in trainer.fit(data, steps=STEPS, checkpoints=checkpoints)]

    with caplog.at_level(logging.WARNING):
        losses = run_ranks(2, body)
    assert losses[0] == [loss for _, loss, _, _ in history]
    assert complete_steps(tmp_path) == [2, 4, 5]
    assert "no committed checkpoint" in caplog.text


def test_what_does_not_fit_is_listed_and_nothing_changes(whole_run, tmp_path):
    _, corpus = whole_run
    train(tmp_path, corpus, 1, 1)
    world = alone()
    cases = [
        (dict(seed=3), ["seed was 0, is 3"]),
        (
            dict(model={**MODEL, "hidden": 64}),
            ["'model/wte.weight'", "[257, 32]", "[257, 64]", "hidden was 32, is 64"],
        ),
        (
            dict(model={**MODEL, "layers": 3}),
            ["missing", "'model/h.2.ln_1.weight'", "'optimizer/exp_avg/h.2"],
        ),
        (dict(model={**MODEL, "layers": 1}), ["unexpected", "'model/h.1.ln_1.weight'"]),
        (dict(model={**MODEL, "heads": 2}), ["heads was 4, is 2"]),
        (
            dict(optimizer=pr.SGD(lr=0.1, momentum=0.9)),
            ["'optimizer/momentum/wte.weight'", "optimizer was 'AdamW'"],
        ),
    ]
    with pr.Checkpointer(tmp_path, world=world) as checkpoints:
        for options, words in cases:
            trainer = trainer_of(world, **options)
            weights = [trainer.parameter(n).tobytes() for n in trainer.parameter_names()]
            refused(pr.CheckpointError, words, lambda trainer=trainer: trainer.resume(checkpoints))
            assert weights == [trainer.parameter(n).tobytes() for n in trainer.parameter_names()]
            assert trainer.applied_steps == 0
        # A warm start needs the weights alone.
        source, target = trainer_of(world), trainer_of(world, seed=3, optimizer=pr.SGD(lr=0.1))
        checkpoints.load(source)
        checkpoints.load(target, weights_only=True)
        assert target.applied_steps == 0
        for name in source.parameter_names():
            assert source.parameter(name).tobytes() == target.parameter(name).tobytes()


def test_other_lanes_are_said(whole_run, tmp_path, caplog):
    _, corpus = whole_run
    train(tmp_path, corpus, 1, 1)
    with caplog.at_level(logging.WARNING), pr.Checkpointer(tmp_path) as checkpoints:
        trainer_of(alone(), lanes=pr.Lanes(dp=4)).resume(checkpoints)
    assert "not with the bits" in caplog.text


def test_checkpoints_of_earlier_versions_and_other_rounds(caplog):
    trainer = trainer_of(alone(), lanes=pr.Lanes(dp=1, order="round_first"), micro_batch=2)
    state = trainer._checkpoint_state().scalars()
    for key, inner in (("lanes", "tp"), ("precision", "gradients")):
        state[key] = {name: value for name, value in state[key].items() if name != inner}
    del state["micro_batch"], state["isa"]
    with caplog.at_level(logging.WARNING, "polyreme"):
        assert trainer._checkpoint_state().check_scalars(state) == []
        assert caplog.text == ""
        assert trainer._checkpoint_state().check_scalars({**state, "micro_batch": 4}) == []
    assert "micro_batch=4" in caplog.text


def test_o_rs_07_vocabulary_padding_and_tp(tmp_path):
    """10 rows on 1, 4 (padded to 12) and 3 ranks, and back: never saved, never seen."""
    model = pr.models.GPT(layers=1, hidden=12, heads=12, vocab=10, seq_len=12)

    def goes_on(world, lanes, step):
        trainer = pr.Trainer(
            model,
            pr.Mesh(world, tp=world.size),
            optimizer=pr.AdamW(lr=0.1),
            global_batch=2,
            lanes=lanes,
            seed=step,
        )
        with pr.Checkpointer(tmp_path, keep=10) as checkpoints:
            if step:
                checkpoints.load(trainer, weights_only=True)
            checkpoints.save(trainer, step=step)
        tokens = np.arange(24).reshape(2, 12) % 10
        return {n: trainer.parameter(n).tobytes() for n in trainer.parameter_names()}, trainer.logits(tokens)

    wide, three = pr.Lanes(tp=4), pr.Lanes(tp=3)
    runs = [
        run_ranks(ranks, lambda world, lanes=lanes, step=step: goes_on(world, lanes, step))
        for step, (ranks, lanes) in enumerate([(1, wide), (4, wide), (3, three), (1, wide)])
    ]
    for step, results in enumerate(runs):
        for weights, logits in results:
            assert weights == runs[0][0][0]
            assert logits.shape == (2, 12, 10)
        assert read_manifest(tmp_path, step).tensors["model/wte.weight"].shape == (10, 12)
    for logits in (runs[1][0][1], runs[3][0][1]):
        np.testing.assert_array_equal(logits, runs[0][0][1])


TP_SCRIPT = """
import sys, hashlib
import numpy as np
import polyreme as pr
from polyreme.testing import run_ranks
model = pr.models.Llama(layers=12, hidden=16, heads=4, kv_heads=2, vocab=23, seq_len=8)
tokens = np.arange(16).reshape(2, 8) % 23

def run(world, source, to):
    mesh = pr.Mesh(world, tp=world.size)
    trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(lr=0.1), global_batch=2, lanes=pr.Lanes(tp=2))
    if source:
        with pr.Checkpointer(f"{sys.argv[1]}/{source}") as checkpoints:
            checkpoints.load(trainer)
    else:
        trainer.step(tokens, tokens)
    with pr.Checkpointer(f"{sys.argv[1]}/{to}") as checkpoints:
        checkpoints.save(trainer)
    bits = hashlib.sha256(trainer.logits(tokens).tobytes())
    for name in trainer.parameter_names():
        bits.update(trainer.parameter(name).tobytes() + trainer.optimizer_state(name, "exp_avg").tobytes())
    return bits.hexdigest()

hashes = set()
for ranks, source, to in ((2, "", "a"), (1, "a", "b"), (2, "b", "c")):
    hashes |= set(run_ranks(ranks, lambda world: run(world, source, to)))
print(*hashes)
"""


def test_o_rs_04_merged_and_cut_again(tmp_path):
    """12 layers with fused gate+up and fused q|k|v of 4 and 2 heads, whatever order sets have."""
    found = set()
    for seed in ("0", "1"):
        folder = tmp_path / seed
        done = subprocess.run(
            [sys.executable, "-c", TP_SCRIPT, str(folder)],
            env=clean_environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().split()) == 1


def test_layout_and_instruction_set_are_recorded(tmp_path, caplog):
    def body(world):
        trainer = trainer_of(world, zero=1, precision="bf16")
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            checkpoints.save(trainer)
        state = trainer._checkpoint_state()
        saved = state.scalars()
        other = "avx2" if saved["isa"] == "amx" else "amx"
        return state.check_scalars({**saved, "isa": other}), saved["isa"], other

    with caplog.at_level(logging.WARNING):
        problems, level, other = run_ranks(2, body)[0]
    manifest = read_manifest(tmp_path, 0)
    assert manifest.layout["mesh"]["dp"] == 2
    assert manifest.layout["zero"] == 1
    assert manifest.state["isa"] == level
    assert problems == []  # bf16 has other bits on amx: that is said, and it goes on
    assert f"at the instruction-set level {other}, this run has {level}" in caplog.text


SCRIPT = """
import os, sys, time
import polyreme as pr
world = pr.init(num_threads=1)
model = pr.models.GPT(layers=1, hidden=32, heads=4, vocab=257, seq_len=24)
trainer = pr.Trainer(model, pr.Mesh(world), optimizer=pr.AdamW(lr=1e-3), global_batch=4)
data = pr.data.TokenDataset(sys.argv[1], seq_len=24)
with pr.Checkpointer(sys.argv[2]) as checkpoints:
    trainer.resume(checkpoints)
    for stats in trainer.fit(data, steps=int(sys.argv[3]), checkpoints=checkpoints):
        print(stats.step, flush=True)
        time.sleep(0.05)
"""


@pytest.mark.mp
def test_f24_signals(whole_run, tmp_path):
    """SIGUSR1 saves and goes on; SIGTERM saves and then ends the process as it would have."""
    _, corpus = whole_run
    command = [sys.executable, "-c", SCRIPT, str(corpus), str(tmp_path / "a"), "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    lines = iter(process.stdout)
    next(lines)
    process.send_signal(signal.SIGUSR1)
    while not complete_steps(tmp_path / "a"):
        next(lines)
    process.send_signal(signal.SIGTERM)
    steps = [int(line) for line in lines]
    assert process.wait(timeout=60) == -signal.SIGTERM
    saved = complete_steps(tmp_path / "a")
    assert len(saved) == 2
    assert not steps or saved[-1] >= steps[-1]


@pytest.mark.mp
@pytest.mark.parametrize("times", [1, 2])
def test_f24_sigterm_outside_of_fit(tmp_path, times):
    """It ends the process with `with`, or at once when it comes twice."""
    script = (
        "import sys, time, polyreme as pr\n"
        "with pr.Checkpointer(sys.argv[1]):\n"
        "    print('in', flush=True)\n"
        "    for _ in range(200):\n"
        "        time.sleep(0.01)\n"
        "    print('left', flush=True)\n"
        "print('out', flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    assert next(process.stdout) == "in\n"
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.stdout.read() == ("left\n" if times == 1 else "")
    assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.mp
def test_o_ck_05_the_end_waits_for_the_save(tmp_path):
    """The last statement starts a save with a slow disk; the interpreter ends after it is committed."""
    script = (
        "import sys, numpy as np, polyreme as pr\n"
        "from polyreme import _core\n"
        "world = pr.init(num_threads=1)\n"
        "checkpoints = pr.Checkpointer(sys.argv[1], world=world)\n"
        "checkpoints._files = _core.FileOps(at=1, kind='delay', delay_s=0.1)\n"
        "checkpoints.save_async({'w': np.arange(5.0)}, step=7)\n"
    )
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        command = [
            sys.executable,
            "-m",
            "polyreme",
            "run",
            "-n",
            str(ranks),
            str(tmp_path / "script.py"),
            str(folder),
        ]
        (tmp_path / "script.py").write_text(script)
        result = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
        assert complete_steps(folder) == [7]
