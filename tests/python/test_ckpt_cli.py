"""`polyreme ckpt`: looks at checkpoints without ranks."""

from __future__ import annotations

import json

import numpy as np
import polyreme as pr
import pytest
from helpers import alone
from polyreme.checkpoint.directory import step_name
from polyreme.cli.main import main


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "runs"
    with pr.Checkpointer(path, world=alone()) as checkpoints:
        for step in (1, 2):
            state = {
                "model/w": np.arange(6, dtype=np.float32).reshape(2, 3)
                + (step == 2) * np.eye(2, 3, dtype=np.float32),
                "model/b": np.zeros(3, np.float16),
                "optimizer/exp_avg/w": np.ones(6, np.float32),
            }
            checkpoints.save(state, step=step, extras={"epoch": step})
    return path


def cli(capsys, *arguments, code=0):
    assert main(["ckpt", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_list_inspect_verify(folder, capsys):
    rows = json.loads(cli(capsys, "list", folder, "--json"))
    assert [(r["step"], r["latest"], r["num_ranks"]) for r in rows] == [(1, False, 1), (2, True, 1)]
    assert "latest" in cli(capsys, "list", folder)
    (folder.parent / "empty").mkdir()
    assert "no committed checkpoint" in cli(capsys, "list", folder.parent / "empty")
    assert cli(capsys, "list", folder / "nowhere", code=2) == ""
    document = json.loads(cli(capsys, "inspect", folder / step_name(1), "--json"))
    assert document["extras"] == {"epoch": 1}
    assert document["tensors"]["model/w"] == {"dtype": "float32", "shape": [2, 3]}
    assert "model/b  float16[3]" in cli(capsys, "inspect", folder)
    assert json.loads(cli(capsys, "verify", folder, "--json")) == {
        "step": 2,
        "tensors": 3,
        "bytes": 54,
        "ok": True,
    }


def test_verify_and_use_errors(folder, capsys):
    path = folder / step_name(2) / "model.00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["ckpt", "verify", str(folder)]) == 1
    assert "CRC-32C" in capsys.readouterr().err
    assert main(["ckpt", "inspect", str(folder / "nowhere")]) == 2
    assert "no committed checkpoint" in capsys.readouterr().err


def test_a_damaged_one_does_not_hide_the_others(folder, capsys):
    (folder / step_name(1) / "manifest.json").write_text("{")
    first, second = cli(capsys, "list", folder, code=1).splitlines()
    assert first.split()[0] == "2"
    assert second.split()[:2] == ["1", "damaged:"]


def test_diff(folder, capsys):
    text = cli(capsys, "diff", folder / step_name(1), folder, code=1)
    assert text.splitlines() == [
        "step: 1 and 2",
        "extras 'epoch': 1 and 2",
        "model/w: 2 of 6 elements differ, the first at 0",
    ]
    assert cli(capsys, "diff", folder, folder) == "equal, bit by bit\n"


def test_export(folder, capsys, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    cli(capsys, "export", folder / step_name(1), "--to", "safetensors", "--out", tmp_path / "w.safetensors")
    weights = safetensors.load_file(tmp_path / "w.safetensors")
    assert {name: (a.dtype.name, a.shape) for name, a in weights.items()} == {
        "w": ("float32", (2, 3)),
        "b": ("float16", (3,)),
    }
    np.testing.assert_array_equal(weights["w"], np.arange(6).reshape(2, 3))
    cli(capsys, "export", folder, "--to", "safetensors", "--out", tmp_path / "all.safetensors", "--all")
    assert "optimizer/exp_avg/w" in safetensors.load_file(tmp_path / "all.safetensors")
    again = ["ckpt", "export", str(folder), "--to", "safetensors", "--out", str(tmp_path / "w.safetensors")]
    assert main(again) == 2
    assert "exists" in capsys.readouterr().err
