"""Checkpoints of the user's own arrays: any layout from any other, names, faults, damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import alone, clean_environment, refused
from polyreme import _core
from polyreme.checkpoint import ArrayPart, complete_steps, latest_step, read_manifest
from polyreme.checkpoint import directory as names
from polyreme.checkpoint.loader import CheckpointFiles
from polyreme.testing import run_ranks

SHAPES = {
    "model/a": (7, 5),
    "model/b": (1000,),
    "optimizer/m/a": (7, 5),
    "optimizer/m/b": (1000,),
    "count": (),
}


def values(step):
    """Tensors that say where they belong: element i of tensor t at a step."""
    return {
        name: np.asarray(
            np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1e4 * t + 1e6 * step, np.float32
        )
        for t, (name, shape) in enumerate(SHAPES.items())
    }


def cut(world, step, *, fill=True):
    """This rank's state: model/ whole, optimizer/ cut over the ranks."""
    state = {}
    for name, array in values(step).items():
        array = array if fill else np.full_like(array, -1)
        if name.startswith("optimizer/"):
            flat = array.reshape(-1)
            bounds = [flat.size * r // world.size for r in range(world.size + 1)]
            begin, end = bounds[world.rank], bounds[world.rank + 1]
            state[name] = ArrayPart(flat[begin:end].copy(), array.shape, begin)
        else:
            state[name] = array
    return state


def require_values(state, step):
    for name, expected in values(step).items():
        value = state[name]
        if isinstance(value, ArrayPart):
            expected = expected.reshape(-1)[value.begin : value.begin + value.array.size]
            value = value.array
        np.testing.assert_array_equal(value, expected, err_msg=name)


def save_steps(folder, *steps, ranks=2, **options):
    def body(world):
        with pr.Checkpointer(folder, world=world, **options) as checkpoints:
            for step in steps:
                checkpoints.save(cut(world, step), step=step, extras={"at": step})

    run_ranks(ranks, body)


def load(folder, ranks=2, *, expect=None, **options):
    def body(world):
        with pr.Checkpointer(folder, world=world, fallback=options.get("fallback", True)) as checkpoints:
            state = cut(world, 0, fill=False)
            try:
                restored = checkpoints.load(state, step=options.get("step"))
            except BaseException:
                for value in state.values():  # nothing has changed
                    assert (np.asarray(value.array if isinstance(value, ArrayPart) else value) == -1).all()
                raise
            require_values(state, restored.step)
            assert restored.extras == {"at": restored.step}
            return restored.step

    steps = run_ranks(ranks, body)
    assert len(set(steps)) == 1
    assert expect is None or steps[0] == expect
    return steps[0]


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_f77_any_number_of_ranks_from_any_other(tmp_path, writers):
    save_steps(tmp_path, 3, ranks=writers)
    for readers in (1, 2, 4):
        load(tmp_path, readers, expect=3)
    files = CheckpointFiles(str(tmp_path), 3)
    # Every element once, whoever holds it.
    data = sum(file.data_bytes for file in files.files)
    assert data == sum(array.nbytes for array in values(3).values())
    assert files.verify() == data


def test_shards_are_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    save_steps(tmp_path, 1, ranks=3)
    whole = {}
    for record in read_manifest(tmp_path, 1).files:
        whole |= safetensors.load_file(tmp_path / names.step_name(1) / record.name)
    expected = values(1)
    assert set(whole) >= {"count", "model/a"}
    parts = sorted(
        (n for n in whole if n.startswith("optimizer/m/b[")), key=lambda n: int(n.split("[")[1].split(":")[0])
    )
    np.testing.assert_array_equal(np.concatenate([whole[n] for n in parts]), expected["optimizer/m/b"])
    np.testing.assert_array_equal(whole["model/a"], expected["model/a"])
    assert {name.split(".")[0] for name in os.listdir(tmp_path / names.step_name(1))} >= {
        "model",
        "optimizer",
    }


def test_retention_latest_and_listing(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert complete_steps(tmp_path) == [3, 4]
    assert (tmp_path / "latest").read_text() == "step-0000000004\n"
    assert latest_step(tmp_path) == 4
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-0000000003", "step-0000000004"]
    save_steps(tmp_path, 4)  # again: replaced
    assert load(tmp_path) == 4
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".") and n != ".lock"]


def test_f76_latest_is_by_step_not_by_clock(tmp_path):
    save_steps(tmp_path, 5, 6)
    os.utime(tmp_path / names.step_name(6), (0, 0))
    os.utime(tmp_path / names.step_name(5), (2**32, 2**32))
    assert latest_step(tmp_path) == 6
    os.unlink(tmp_path / "latest")
    assert load(tmp_path) == 6


def test_o_ck_03_retention_never_deletes_the_only_complete_one(tmp_path):
    """Saves with keep=1 and a slow disk: at every moment a complete one is there, and named."""
    seen, ended = [], threading.Event()

    def watch():
        while not ended.is_set():
            step = latest_step(tmp_path)
            if step is not None:
                seen.append(step)
            else:
                assert not seen, "no complete checkpoint any more"
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()

    def body(world):
        with pr.Checkpointer(tmp_path, world=world, keep=1) as checkpoints:
            checkpoints._files = _core.FileOps(at=1, kind="delay", delay_s=0.01)
            for step in (1, 2, 3):
                checkpoints.save_async(cut(world, step), step=step, extras={"at": step})

    run_ranks(2, body)
    ended.set()
    watcher.join()
    assert sorted(set(seen)) == seen[:1] + [s for s in (2, 3) if s in seen and s != seen[0]]
    assert complete_steps(tmp_path) == [3]


def test_o_ck_02_pointer_moves_when_all_ranks_are_done(tmp_path):
    save_steps(tmp_path, 1)

    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            if world.rank == 1:
                checkpoints._files = _core.FileOps(at=1, kind="delay", delay_s=0.1)
            checkpoints.save_async(cut(world, 2), step=2, extras={"at": 2})
            if world.rank == 0:
                while len(os.listdir(tmp_path)) < 4:  # its own part is being written
                    time.sleep(0.001)
                assert latest_step(tmp_path) == 1
            checkpoints.wait()
            assert latest_step(tmp_path) == 2

    run_ranks(2, body)
    load(tmp_path, expect=2)


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_o_ck_04_f74_two_saves_at_once(tmp_path, when_busy):
    def body(world):
        with pr.Checkpointer(tmp_path, world=world, when_busy=when_busy) as checkpoints:
            checkpoints._files = _core.FileOps(at=1, kind="delay", delay_s=0.02)
            state = cut(world, 1)
            assert checkpoints.save_async(state, step=1, extras={"at": 1})
            for value in state.values():  # training goes on
                array = value.array if isinstance(value, ArrayPart) else value
                array += 1e6
            started = checkpoints.save_async(state, step=2, extras={"at": 2})
            held = checkpoints.stats.staging_bytes
            assert checkpoints.load(cut(world, 0, fill=False)).step == (2 if started else 1)  # waits
            checkpoints.wait()
            assert checkpoints.stats.staging_bytes == held
            return started, checkpoints.stats.saved, checkpoints.stats.skipped

    assert run_ranks(2, body) == [(True, 2, 0) if when_busy == "wait" else (False, 1, 1)] * 2
    load(tmp_path, step=1, expect=1)
    load(tmp_path, expect=2 if when_busy == "wait" else 1)


@pytest.mark.parametrize("at", range(1, 11))
def test_f63_f64_a_failed_write_fails_on_all_ranks(tmp_path, at):
    """Any file operation of rank 1 fails with ENOSPC: the save is lost with rank, path and errno; the training
    goes on, and the next save works."""
    save_steps(tmp_path, 1)

    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            if world.rank == 1:
                checkpoints._files = _core.FileOps(at=at, kind="error", error_number=28)
            checkpoints.save_async(cut(world, 2), step=2, extras={"at": 2})
            checkpoints.wait()
            first = checkpoints.stats
            left = complete_steps(tmp_path)
            world.barrier()
            checkpoints.save(cut(world, 3), step=3, extras={"at": 3})
            return first.failed, first.last_error, left

    (failed, text, left), other = run_ranks(2, body)
    assert other == (failed, text, left)
    assert failed == 1
    assert all(word in text for word in ("step 2", "rank 1", "ENOSPC 28", str(tmp_path), "free space", "pid"))
    assert left == [1]
    load(tmp_path, expect=3)
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".") and n != ".lock"]


def test_f63_on_error_raise(tmp_path):
    def body(world):
        with pr.Checkpointer(tmp_path, world=world, on_error="raise") as checkpoints:
            checkpoints.save(cut(world, 1), step=1)
            checkpoints._files = _core.FileOps(at=1, kind="error", error_number=30, sticky=True)
            checkpoints.save_async(cut(world, 2), step=2, extras={"at": 2})
            refused(pr.CheckpointError, ["ranks 0, 1", "EROFS"], checkpoints.wait)
            checkpoints.wait()  # said once

    run_ranks(2, body)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[:-8])
    elif how == "flip":
        data[-10] ^= 1
        path.write_bytes(data)
    elif how == "header":
        data[20] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flip", "header", "delete"])
@pytest.mark.parametrize("file", ["optimizer.00001.safetensors", "manifest.json"])
def test_o_ck_10_f68_f69_damage_is_told_by_all_ranks(tmp_path, how, file):
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / names.step_name(2) / file, how)
    if (file, how) == ("manifest.json", "delete"):
        assert latest_step(tmp_path) == 1  # then it is no checkpoint
        return
    words = [file] if how != "delete" else [file, "missing"]
    refused(pr.CheckpointCorrupt, words, lambda: load(tmp_path, step=2))
    refused(pr.CheckpointCorrupt, words, lambda: load(tmp_path, fallback=False))
    assert load(tmp_path) == 1  # the policy
    save_steps(tmp_path, 2)
    assert load(tmp_path) == 2


def test_f71_manifest_with_paths(tmp_path):
    save_steps(tmp_path, 1)
    path = tmp_path / names.step_name(1) / "manifest.json"
    original = json.loads(path.read_text())
    for name in ("../x", "/etc/passwd", "a/b", "", ".lock", "x\0y"):
        document = {k: v for k, v in original.items() if k != "crc32c"}
        document["files"] = [[name, *document["files"][0][1:]], *document["files"][1:]]
        body = json.dumps(document).encode()[:-1]
        path.write_bytes(body + f', "crc32c": "{_core.crc32c(body):08x}"}}\n'.encode())
        refused(pr.CheckpointCorrupt, ["no name of a file"], lambda: load(tmp_path))
    inside = tmp_path / names.step_name(1)
    path.write_bytes(json.dumps(original).encode())
    refused(pr.CheckpointCorrupt, ["checksum"], lambda: load(tmp_path))
    shutil.rmtree(inside)
    inside.symlink_to(tmp_path)
    assert complete_steps(tmp_path) == []


def test_f80_only_left_overs(tmp_path):
    left = tmp_path / names.hidden_name("tmp", 4, "00ff")
    left.mkdir()
    (left / "model.00000.safetensors").write_bytes(b"half")
    (tmp_path / names.step_name(3)).mkdir()  # by hand, without a manifest
    refused(pr.CheckpointError, ["no committed checkpoint", str(tmp_path)], lambda: load(tmp_path))
    save_steps(tmp_path, 4)  # which may change the directory
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", names.step_name(3), names.step_name(4)]


def test_o_ck_08_left_over_of_an_interrupted_save(tmp_path):
    save_steps(tmp_path, 9)
    partial = tmp_path / names.step_name(10)
    partial.mkdir()
    (partial / "model.00000.safetensors").write_bytes(b"half")
    (tmp_path / names.hidden_name("tmp", 10, "ab12")).mkdir()
    (tmp_path / names.hidden_name("del", 8, "ab12")).mkdir()
    (tmp_path / ".latest-ab12").write_text("step-0000000010\n")
    assert load(tmp_path) == 9
    save_steps(tmp_path, 10)
    assert load(tmp_path) == 10
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", names.step_name(9), names.step_name(10)]


def test_o_ck_09_names_that_collide_on_disk(tmp_path):
    folder = tmp_path / "Prüf stände"
    keys = [
        "a.b",
        "a/b",
        "a_b",
        "A.b",
        ".metadata",
        "..",
        "x" * 300,
        "with spaces",
        "größe",
        "model/../../x",
        'a\n"\\',
    ]

    def body(world):
        with pr.Checkpointer(folder, world=world) as checkpoints:
            checkpoints.save({key: np.full(3, i, np.int32) for i, key in enumerate(keys)}, step=1)
            state = {key: np.zeros(3, np.int32) for key in keys}
            checkpoints.load(state)
            for i, key in enumerate(keys):
                assert (state[key] == i).all(), key
            for bad in ("", "__metadata__", "w[0:5]", "x" * 2000, "a\0b", "\ud800"):
                save = lambda bad=bad: checkpoints.save({bad: np.zeros(1)}, step=2)  # noqa: E731
                refused(pr.InvalidArgument, ["the name"], save)

    run_ranks(2, body)
    assert sorted(os.listdir(tmp_path)) == ["Prüf stände"]


def test_o_rs_01_missing_and_unexpected(tmp_path):
    arrays = {"a": np.full(4, 1.0), "b": np.full(4, 2.0), "old": np.full(4, 3.0)}

    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            checkpoints.save(arrays, step=1)
            state = {name: np.zeros(4) for name in ("a", "b", "new")}
            words = ["ranks 0, 1", "'new'", "'old'", "missing", "unexpected"]
            refused(pr.CheckpointError, words, lambda: checkpoints.load(state))
            assert all((array == 0).all() for array in state.values())
            restored = checkpoints.load(state, strict=False)
            assert (restored.missing, restored.unexpected) == (["new"], ["old"])
            assert [float(state[n][0]) for n in ("a", "b", "new")] == [1, 2, 0]
            wrong = {"a": np.zeros(5), "b": np.zeros(4, np.float32), "old": np.zeros(4)}
            words = [
                "'a' is float64[4] in the checkpoint, float64[5] here",
                "'b' is float64[4]",
                "float32[4] here",
            ]
            refused(pr.CheckpointError, words, lambda: checkpoints.load(wrong, strict=False))

    run_ranks(2, body)


def test_o_rs_06_names_not_places(tmp_path):
    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            checkpoints.save({"p": np.full(5, 1.0), "q": np.full(5, 2.0)}, step=1)
            state = {"q": np.zeros(5), "p": np.zeros(5)}
            checkpoints.load(state)
            assert (state["p"][0], state["q"][0]) == (1, 2)

    run_ranks(2, body)


def test_ranks_that_register_in_another_order(tmp_path):
    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            pairs = [("p", np.full(5, 1.0)), ("q", np.full(5, 2.0))]
            checkpoints.save(dict(pairs if world.rank else pairs[::-1]), step=1)
            state = {"q": np.zeros(5), "p": np.zeros(5)}
            checkpoints.load(state)
            assert (state["p"][0], state["q"][0]) == (1, 2)

    run_ranks(2, body)


def test_ranks_that_do_not_agree(tmp_path):
    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            w = np.zeros(4)
            refused(
                pr.CheckpointError,
                ["step", "rank 1"],
                lambda: checkpoints.save({"w": w}, step=1 + world.rank),
            )
            save = lambda: checkpoints.save({"w": w}, step=1, extras={"rank": world.rank})  # noqa: E731
            refused(pr.CheckpointError, ["extras", "rank 1"], save)
            save = lambda: checkpoints.save({"w": np.zeros(4 + world.rank)}, step=1)  # noqa: E731
            refused(pr.InvalidArgument, ["'w'", "[5] on rank 1", "[4]"], save)
            part = ArrayPart(np.zeros(3), (8,), 5 * world.rank)
            save = lambda: checkpoints.save({"w": part}, step=1)  # noqa: E731
            refused(pr.InvalidArgument, ["'w': no rank holds its elements 3 to 5 of 8"], save)
            if world.rank == 1:
                save = lambda: checkpoints.save({"w": 3}, step=1)  # noqa: E731
                refused(pr.InvalidArgument, ["scalars belong into extras"], save)
            else:
                save = lambda: checkpoints.save({"w": w}, step=1, extras={"x": {1, 2}})  # noqa: E731
                refused(pr.InvalidArgument, ["JSON"], save)
            world.barrier()
            assert complete_steps(tmp_path) == []

    run_ranks(2, body)


def test_two_jobs_in_one_directory(tmp_path):
    world = alone()
    first = pr.Checkpointer(tmp_path, world=world)
    first.save(cut(world, 1), step=1, extras={"at": 1})
    second = pr.Checkpointer(tmp_path, world=world)
    refused(pr.CheckpointError, ["this process", "close()"], lambda: second.save(cut(world, 2), step=2))
    saved = "import polyreme as pr; pr.Checkpointer('.', world=pr.init()).save({}, step=2)"
    command = [sys.executable, "-c", saved]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    for word in ("another job", str(os.getpid()), "host", "end the other one"):
        assert word in done.stderr
    assert load(tmp_path) == 1  # which needs no lock
    first.close()
    second.save(cut(world, 2), step=2)
    second.close()


def test_loading_needs_no_more_than_to_read(tmp_path):
    """Also through a link to the directory, which is what clusters have."""
    real = tmp_path / "scratch"
    (tmp_path / "runs").symlink_to(real)
    save_steps(tmp_path / "runs", 1)
    os.unlink(real / ".lock")
    before = sorted(os.walk(real))
    assert load(tmp_path / "runs") == 1
    assert sorted(os.walk(real)) == before
    refused(pr.CheckpointError, ["no committed"], lambda: load(tmp_path / "mistyped"))
    assert not (tmp_path / "mistyped").exists()


def test_what_is_kept_after_going_back_leads_to_the_newest(tmp_path):
    save_steps(tmp_path, 100, 200, 300)
    for step, kept in ((110, [100, 110, 200]), (120, [100, 110, 120]), (130, [110, 120, 130])):
        save_steps(tmp_path, step)
        assert complete_steps(tmp_path) == kept


def test_other_settings_on_one_rank_are_named(tmp_path):
    def body(world):
        words = ["rank 1", "every=2", "rank 0 has 1"]
        refused(
            pr.CheckpointError, words, lambda: pr.Checkpointer(tmp_path, world=world, every=1 + world.rank)
        )

    run_ranks(2, body)


def test_files_are_private_and_nothing_is_followed(tmp_path):
    save_steps(tmp_path / "runs" / "a", 1)
    inside = tmp_path / "runs" / "a" / names.step_name(1)
    assert all(os.stat(inside / n).st_mode & 0o777 == 0o600 for n in os.listdir(inside))
    assert os.stat(inside).st_mode & 0o777 == 0o700


@pytest.mark.torch
def test_arrays_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    world = alone()
    source = {"w": torch.randn(5, 3).bfloat16(), "i": torch.arange(7)}
    with pr.Checkpointer(tmp_path, world=world) as checkpoints:
        checkpoints.save(source, step=1)
        target = {"w": torch.zeros(5, 3).bfloat16(), "i": torch.zeros(7, dtype=torch.int64)}
        checkpoints.load(target)
    assert torch.equal(source["w"], target["w"])
    assert torch.equal(source["i"], target["i"])


def test_o_rs_02_o_rs_03_stages_of_any_number(tmp_path):
    """Layers dealt out to stages, uneven ones too: names are global, so each layer finds its values."""

    def stage(world, layers, value):
        mine = range(layers * world.rank // world.size, layers * (world.rank + 1) // world.size)
        return {
            f"{kind}/h.{k}.w": np.full(6, value(k) + 100 * i, np.float32)
            for k in mine
            for i, kind in enumerate(("model", "optimizer/m"))
        }

    for layers in (5, 6):
        for writers in (1, 2, 3):
            folder = tmp_path / f"{layers}-{writers}"

            def save(world, folder=folder, layers=layers):
                with pr.Checkpointer(folder, world=world) as checkpoints:
                    checkpoints.save(stage(world, layers, lambda k: k + 1), step=1)

            def restore(world, folder=folder, layers=layers):
                with pr.Checkpointer(folder, world=world) as checkpoints:
                    state, expected = (
                        stage(world, layers, lambda k: -1),
                        stage(world, layers, lambda k: k + 1),
                    )
                    restored = checkpoints.load(state)
                    assert (restored.missing, restored.unexpected) == ([], [])
                    for name, array in expected.items():
                        np.testing.assert_array_equal(state[name], array, err_msg=name)

            run_ranks(writers, save)
            for readers in (1, 2, 3, 4):
                run_ranks(readers, restore)


def test_f63_a_full_disk(tmp_path):
    """A real one: a small tmpfs. What there was stays, nothing half-written does, and space helps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    try:
        with pr.Checkpointer(disk / "runs", world=alone(), keep=1) as checkpoints:
            small, large = {"w": np.zeros(1000)}, {"w": np.zeros(100_000)}
            checkpoints.save(small, step=1)
            words = ["step 2", "rank 0", "ENOSPC", str(disk)]
            refused(pr.CheckpointError, words, lambda: checkpoints.save(large, step=2))
            assert sorted(os.listdir(disk / "runs")) == [".lock", "latest", "step-0000000001"]
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
            checkpoints.save(large, step=2)
            assert complete_steps(disk / "runs") == [2]
            checkpoints.load(large)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(directory=3), ["directory=3", "Path"]),
        (dict(directory=""), ["directory=''", "a path"]),
        (dict(directory="a\0b"), ["directory=", "a path"]),
        (dict(every=0), ["every", "at least 1", "None"]),
        (dict(keep=0), ["keep", "at least 1"]),
        (dict(when_busy="later"), ["when_busy='later'", "'wait' or 'skip'"]),
        (dict(on_error=None), ["on_error=None", "'warn' or 'raise'"]),
        (dict(timeout_s=-1), ["timeout_s"]),
        (dict(world=3), ["world", "polyreme.World"]),
    ],
)
def test_arguments(tmp_path, options, words):
    refused(pr.InvalidArgument, words, lambda: pr.Checkpointer(**{"directory": tmp_path / "a", **options}))
    assert not os.listdir(tmp_path)


def test_arguments_of_calls(tmp_path):
    unbound = pr.Checkpointer(tmp_path / "a")
    refused(pr.InvalidArgument, ["world=world"], lambda: unbound.save({"w": np.zeros(3)}, step=1))
    with pr.Checkpointer(tmp_path / "a", world=alone()) as checkpoints:
        refused(pr.InvalidArgument, ["step"], lambda: checkpoints.save({"w": np.zeros(3)}))
        refused(pr.InvalidArgument, ["a Trainer, or names to arrays"], lambda: checkpoints.save(7, step=1))
        refused(
            pr.InvalidArgument, ["contiguous"], lambda: checkpoints.save({"w": np.zeros((4, 4)).T}, step=1)
        )
        refused(
            pr.InvalidArgument, ["complex128"], lambda: checkpoints.save({"w": np.zeros(3, complex)}, step=1)
        )
        checkpoints.save({"w": np.zeros(3)}, step=1)
        read_only = np.zeros(3)
        read_only.setflags(write=False)
        # Told to all ranks alike, as any problem of one of them is.
        refused(pr.CheckpointError, ["read-only"], lambda: checkpoints.load({"w": read_only}))
        refused(
            pr.CheckpointError,
            ["no committed checkpoint of step 9", "[1]"],
            lambda: checkpoints.load({"w": np.zeros(3)}, step=9),
        )
