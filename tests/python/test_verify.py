"""`polyreme verify` on real processes: equal runs pass, a planted bug is named by tensor, step and rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import HANG_S, clean_environment, polyreme, processes_with
from polyreme.verification import first_difference

SCRIPT = """
import sys
import numpy as np
import polyreme as pr
world = pr.init()
model = pr.models.GPT(layers=2, hidden=16, heads=2, vocab=31, seq_len=8)
lanes = pr.Lanes(dp=4)
if "no-lanes" in sys.argv:
    lanes = None
if "own-lanes" in sys.argv:
    lanes = pr.Lanes(dp=2 * world.size)
own = dict(pp=2) if "pipeline" in sys.argv else {}
mesh = pr.Mesh(world, **own)
zero = pr.Zero(stage=1, shard_size=2 if mesh.size("dp") % 2 == 0 else None)
split = [1, 1] if "pipeline" in sys.argv else None
trainer = pr.Trainer(
    model, mesh, optimizer=pr.AdamW(lr=1e-2), global_batch=4, lanes=lanes, zero=zero, split=split
)
if "layout" in sys.argv:
    shown = [mesh.size("dp"), mesh.size("pp"), trainer.lanes.dp, trainer.memory()["gradients"]]
    print(shown, file=open(f"layout-{world.size}-{world.rank}", "w"))
random = np.random.default_rng(0)
share = 4 // mesh.size("dp")
first = mesh.coordinate("dp") * share
checkpoints = pr.Checkpointer("saved", every=1)
for step in range(100):
    tokens = random.integers(0, 31, (4, 9))[first : first + share]
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    if "save" in sys.argv:
        checkpoints.save(trainer)
    if "bug" in sys.argv and step == 1 and world.rank == 1:
        bias = trainer.parameter("ln_f.bias")
        bias[3] += 1e-6
        trainer.set_parameter("ln_f.bias", bias)
    if "crash" in sys.argv:
        raise ValueError("boom")
"""


# A norm of the user's own that shares the tokens out over tp in the backward, each rank its own, as sequence
# parallelism does. What is missing is the sum of the ranks' gradients. One rank has all tokens.
MISSING_REDUCTION = """
import sys
import numpy as np
import polyreme as pr

class Norm(pr.layers.Layer):
    def parameters(self, inputs, outputs):
        return {"gain": pr.layers.Parameter(shape=(inputs,), init="ones")}

    def forward(self, call):
        call.scale = 1 / np.sqrt((call.x**2).mean(axis=1, keepdims=True) + 1e-5)
        return call.x * call.scale * call.weights["gain"]

    def backward_input(self, call):
        dx = call.dy * call.weights["gain"]
        return call.scale * (dx - call.x * call.scale**2 * (dx * call.x).mean(axis=1, keepdims=True))

    def backward_weight(self, call):
        own = len(call.x) // mesh.size("tp")
        terms = call.dy * call.x * call.scale
        for row in terms[mesh.coordinate("tp") * own :][:own] if "bug" in sys.argv else terms:
            call.grads["gain"] += row

mesh = pr.Mesh(pr.init())
model = pr.models.GPT(layers=2, hidden=16, heads=2, vocab=31, seq_len=8, replace={"h.1.ln_2": Norm()})
trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(lr=1e-2), global_batch=4)
random = np.random.default_rng(0)
for step in range(100):
    tokens = random.integers(0, 31, (4, 9))
    trainer.step(tokens[:, :-1], tokens[:, 1:])
"""


def verify(tmp_path, *arguments, layouts="dp=2 dp=4", options=(), text=SCRIPT):
    script = tmp_path / "script.py"
    script.write_text(text)
    options = options or ["--layouts", layouts]
    return polyreme("verify", "--json", "--steps", 4, *options, script, *arguments, cwd=tmp_path)


def equal_layouts(done, steps=4):
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["steps"] == steps
    return [layout["layout"] for layout in result["layouts"]]


def test_equal_bits(tmp_path):
    layouts = "dp=2 tp=2,pp=2,zero=3,schedule=zb_v,micro_batch=2"
    assert equal_layouts(verify(tmp_path, "layout", layouts=layouts)) == layouts.split()
    alone, both, four = (
        json.loads((tmp_path / f"layout-{size}-0").read_text().replace("'", '"')) for size in (1, 2, 4)
    )
    assert [alone[:3], both[:3], four[:3]] == [[1, 1, 4], [2, 1, 4], [1, 2, 4]]
    assert four[3] < both[3] / 2  # its stage and its part of the model


def test_the_scripts_own_layout(tmp_path):
    done = verify(tmp_path, "pipeline", "no-lanes", options=["-n", 4])
    assert equal_layouts(done) == ["the script's own layout on 4 ranks"]


def test_two_comparisons_at_once_are_refused(tmp_path):
    done = verify(tmp_path, options=["-n", 2, "--layouts", "dp=2"])
    assert done.returncode == 2
    assert "--layouts and -n" in done.stderr


def test_open_lanes_are_the_same_in_every_run(tmp_path):
    assert equal_layouts(verify(tmp_path, "no-lanes", "layout")) == ["dp=2", "dp=4"]
    assert (tmp_path / "layout-1-0").read_text().startswith("[1, 1, 4,")


def test_nothing_is_saved(tmp_path):
    equal_layouts(verify(tmp_path, "save", layouts="dp=2"))
    assert not (tmp_path / "saved").exists()


def test_planted_bug_is_named(tmp_path):
    done = verify(tmp_path, "bug", layouts="dp=2")
    assert done.returncode == 1, done.stderr
    (layout,) = json.loads(done.stdout)["layouts"]
    assert layout["difference"].startswith("step 3, rank 1: the weight before the step of 'ln_f.bias'")


def test_a_missing_reduction_of_a_norms_gradient_is_named(tmp_path):
    assert equal_layouts(verify(tmp_path, layouts="tp=2", text=MISSING_REDUCTION)) == ["tp=2"]
    done = verify(tmp_path, "bug", layouts="tp=2", text=MISSING_REDUCTION)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["layouts"][0]["difference"]
    assert found.startswith("step 1, rank 0: the gradient of 'h.1.ln_2.gain' is "), found
    assert "the 1-rank run has" in found


def test_lanes_that_follow_the_ranks_are_named(tmp_path):
    done = verify(tmp_path, "own-lanes", layouts="dp=2")
    assert done.returncode == 1, done.stderr
    assert "lanes.dp=4 and lanes.dp=2" in json.loads(done.stdout)["layouts"][0]["difference"]


@pytest.mark.parametrize(
    "arguments, layouts, words",
    [
        (["crash"], "dp=2", ["boom", "exit code 1"]),
        ([], "dp=2,dp=4", ["dp=4", "dp=N"]),
        ([], "dp=0", ["dp=0"]),
        ([], "zero=4", ["zero=4", "0, 1, 2 or 3"]),
        ([], "schedule=none", ["schedule=none", "zb_v"]),
        ([], "pp=5", ["exit code", "5 rank(s) with pp=5"]),
        ([], " ", ["--layouts", "dp=2"]),
    ],
)
def test_refusals(tmp_path, arguments, layouts, words):
    done = verify(tmp_path, *arguments, layouts=layouts)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_leaves_no_folder(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(1000)\n")
    (tmp_path / "tmp").mkdir()
    mark = f"{os.getpid()}-{number}"
    process = subprocess.Popen(
        [sys.executable, "-m", "polyreme", "verify", script],
        cwd=tmp_path,
        env=clean_environment(TMPDIR=str(tmp_path / "tmp"), VERIFY_TEST=mark),
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + HANG_S
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert os.listdir(tmp_path / "tmp")
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
    finally:
        process.kill()
    assert os.listdir(tmp_path / "tmp") == []
    assert processes_with("VERIFY_TEST", mark) == []


def record(step=1, loss=1.0, **changes):
    tensors = {"a": "x", "b": "y"}
    base = {"step": step, "lanes": {"dp": 4}, "loss": loss.hex(), "grad_norm": (2.0).hex()}
    return {**base, "weights_before": tensors, "gradients": tensors, "weights": tensors, **changes}


def test_first_difference_is_in_order_of_computation():
    expected = [record(1), record(2)]
    assert first_difference(expected, [[record(1), record(2)]] * 3) is None
    later = record(1, weights={"a": "x", "b": "other"})
    earlier = record(1, gradients={"a": "other", "b": "y"})
    found = first_difference(expected, [[later, record(2)], [earlier, record(2)]])
    assert (found.step, found.rank, found.what, found.name) == (1, 1, "the gradient", "a")
    found = first_difference(expected, [[record(1), record(2, loss=1.5)]])
    assert (found.step, found.what, found.expected, found.got) == (2, "loss", "1.0", "1.5")
    found = first_difference(expected, [[record(1)]])
    assert (found.step, found.got) == (2, "not recorded")
