"""Saving and loading against memcpy, a plain file, torch.save and torch.distributed.checkpoint: one rank, one disk.

Every contender has the same tensors; they take turns, in changing order, and what they did in the same round is
compared: the medians of those ratios count. Files are durable (fsync) at the end of every save; earlier files are
deleted before it. A save is the copy into staging memory (the stall), which a plain file does not need, and the write.
A load comes from the disk: the page cache is told to forget the files before it. A second one, the "reload", comes from
the page cache as far as the first has filled it. "plain" is a buffered writer or reader, or one that goes past the page
cache (O_DIRECT), 8 MiB at a time: whichever has the better median.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import init
from ..checkpoint import Checkpointer, complete_steps
from ..checkpoint.directory import step_name
from ..checks import check_int
from ..environment import RankEnvironment
from ..errors import InvalidArgument, NotAvailable
from ..mesh import Mesh
from ..models import GPT
from ..optim import AdamW
from ..trainer import Trainer

__all__ = ["bench_checkpoint", "bench_training", "render_checkpoint"]

_NUM_TENSORS = 60
RIVALS = ("torch", "dcp")
Arrays = dict[str, NDArray[np.float32]]
Turn = Callable[[], dict[str, float]]


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make_state(num_bytes: int) -> Arrays:
    """Tensors of a few sizes, as a model and two moments have them."""
    each = num_bytes // _NUM_TENSORS // 4
    rows = {f"model/w{i}": each for i in range(_NUM_TENSORS // 3)}
    rows |= {f"optimizer/{kind}/w{i}": each for kind in ("m", "v") for i in range(_NUM_TENSORS // 3)}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(count, np.float32) for name, count in rows.items()}


def bench_checkpoint(
    *, num_bytes: int, repeats: int, directory: str | None = None, against: Sequence[str] = ()
) -> dict[str, Any]:
    """Medians in seconds, and ratios above 1 where ours is faster.

    directory: on the disk that is measured; default: that of temporary files. against: of RIVALS.

    Raises:
        InvalidArgument: unknown rivals, sizes out of range.
        NotAvailable: rivals that are not installed.
    """
    check_int("bench checkpoint: bytes", num_bytes, _NUM_TENSORS * 4)
    check_int("bench checkpoint: repeats", repeats, 1)
    unknown = sorted(set(against) - {*RIVALS})
    if unknown:
        raise InvalidArgument(f"bench checkpoint: against {unknown}; expected some of {list(RIVALS)}")
    state = make_state(num_bytes)
    folder = tempfile.mkdtemp(prefix="polyreme-bench-", dir=directory)
    try:
        turns: dict[str, Turn] = {"plain": _plain(state, folder), "polyreme": _own(state, folder)}
        if "torch" in against:
            turns["torch"] = _torch(state, folder)
        if "dcp" in against:
            turns["dcp"] = _dcp(state, folder)
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        for repeat in range(repeats + 1):  # the first is a warm-up
            for name in list(turns)[:: 1 if repeat % 2 else -1]:
                result = turns[name]()
                if repeat:
                    seen[name].append(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen["plain"] = _better_of_each(seen["plain"])
    ratios = {
        "stall_over_memcpy": _ratios(seen, "plain", "memcpy_s", "stall_s"),
        "write_over_plain_write": _ratios(seen, "plain", "write_s", "write_s"),
        "load_over_plain_read": _ratios(seen, "plain", "load_s", "load_s"),
        "reload_over_plain_read": _ratios(seen, "plain", "reload_s", "reload_s"),
    }
    for name in turns:
        if name in RIVALS:
            for key in ("stall_s", "save_s", "load_s", "reload_s"):
                if key in seen[name][0]:
                    ratios[f"{key[:-2]}_over_{name}"] = _ratios(seen, name, key, key)
    return {
        "bytes": sum(array.nbytes for array in state.values()),
        "repeats": repeats,
        "seconds": {
            name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            for name, rounds in seen.items()
        },
        "speed_ratios": {name: statistics.median(values) for name, values in ratios.items()},
        "ranges": {name: [min(values), max(values)] for name, values in ratios.items()},
    }


def _ratios(seen: dict[str, list[dict[str, float]]], rival: str, key: str, own_key: str) -> list[float]:
    """Of each round: above 1 where ours is faster."""
    return [theirs[key] / own[own_key] for theirs, own in zip(seen[rival], seen["polyreme"], strict=True)]


def _better_of_each(rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """Of "direct write_s" and "buffered write_s" the one with the better median, as "write_s"."""

    def median(key: str) -> float:
        return statistics.median(r[key] for r in rounds)

    kinds: dict[str, list[str]] = {}
    for key in rounds[0]:
        kinds.setdefault(key.rsplit(" ", 1)[-1], []).append(key)
    best = {name: min(keys, key=median) for name, keys in kinds.items()}
    return [{name: r[key] for name, key in best.items()} for r in rounds]


def _drop_cache(folder: str) -> None:
    """Makes the next reads of the files below `folder` come from the disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(path, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _loads(folder: str, load: Callable[[], Any]) -> dict[str, float]:
    _drop_cache(folder)
    return {"load_s": _timed(load), "reload_s": _timed(load)}


def _plain(state: Arrays, folder: str) -> Turn:
    size = sum(array.nbytes for array in state.values())
    rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    staging, target = mmap.mmap(-1, rounded), mmap.mmap(-1, rounded)
    copied = np.frombuffer(staging, np.uint8)
    np.frombuffer(target, np.uint8)[:] = 1  # there before it is timed, as ours is from the save
    path = os.path.join(folder, "plain")
    os.mkdir(path)
    name = os.path.join(path, "file")

    def copy() -> None:
        at = 0
        for array in state.values():
            copied[at : at + array.nbytes] = array.view(np.uint8)
            at += array.nbytes

    def write(flags: int) -> float:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        start = time.perf_counter()
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        try:
            view = memoryview(staging)
            while view:
                view = view[os.write(fd, view[: 8 << 20]) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - start

    def read(flags: int) -> float:
        start = time.perf_counter()
        fd = os.open(name, os.O_RDONLY | flags)
        try:
            view = memoryview(target)
            while view:
                view = view[os.readv(fd, [view[: 8 << 20]]) :]
        finally:
            os.close(fd)
        return time.perf_counter() - start

    def turn() -> dict[str, float]:
        result = {"memcpy_s": _timed(copy)}
        for kind, flags in (("buffered", 0), ("direct", os.O_DIRECT)):
            with contextlib.suppress(OSError):  # not every file system can
                result[f"{kind} write_s"] = write(flags)
                _drop_cache(path)
                result[f"{kind} load_s"] = read(flags)
        read(0)
        return {**result, "reload_s": read(0)}

    return turn


def _own(state: Arrays, folder: str) -> Turn:
    world = init(environment=RankEnvironment(), num_threads=1)
    target = {name: np.empty_like(array) for name, array in state.items()}
    path = os.path.join(folder, "own")
    # Everybody's earlier files are deleted between the turns.
    checkpoints = Checkpointer(path, world=world, keep=1_000_000, on_error="raise", signals=False)
    step = 0

    def turn() -> dict[str, float]:
        nonlocal step
        for earlier in complete_steps(path):
            shutil.rmtree(os.path.join(path, step_name(earlier)))
        step += 1
        start = time.perf_counter()
        checkpoints.save_async(state, step=step)
        stall = time.perf_counter() - start
        checkpoints.wait()
        save = time.perf_counter() - start
        loads = _loads(path, lambda: checkpoints.load(target))
        return {"stall_s": stall, "write_s": checkpoints.stats.write_s, "save_s": save, **loads}

    return turn


def _torch(state: Arrays, folder: str) -> Turn:
    torch = _import_torch()
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    path = os.path.join(folder, "torch")
    os.mkdir(path)
    name = os.path.join(path, "file.pt")

    def save() -> None:
        with open(name, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def turn() -> dict[str, float]:
        result = {"save_s": _timed(save), **_loads(path, lambda: torch.load(name))}
        os.unlink(name)
        return result

    return turn


def _dcp(state: Arrays, folder: str) -> Turn:
    torch = _import_torch()
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    path = os.path.join(folder, "dcp")

    def turn() -> dict[str, float]:
        save = _timed(lambda: dcp.save(tensors, checkpoint_id=path))
        loads = _loads(path, lambda: dcp.load(target, checkpoint_id=path))
        shutil.rmtree(path)
        start = time.perf_counter()
        future = dcp.async_save(tensors, checkpoint_id=path)
        stall = time.perf_counter() - start
        future.result()
        shutil.rmtree(path)
        return {"stall_s": stall, "save_s": save, **loads}

    return turn


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotAvailable(
            f"PyTorch is not installed: {error}; pip install torch, or leave --against out"
        ) from None
    torch.set_num_threads(1)
    return torch


def bench_training(
    model: GPT, *, repeats: int, directory: str | None = None, batch: int = 4
) -> dict[str, Any]:
    """What a save costs a training of one rank and one thread: blocks of steps with and without one, in turn.

    slowdown_percent: of a training that saves every 100 steps.
    """
    world = init(environment=RankEnvironment(), num_threads=1)
    trainer = Trainer(model, Mesh(world), optimizer=AdamW(lr=1e-4), global_batch=batch)
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.vocab, (batch, model.seq_len + 1))
    block = 10

    def steps() -> None:
        for _ in range(block):
            trainer.step(tokens[:, :-1], tokens[:, 1:])

    folder = tempfile.mkdtemp(prefix="polyreme-bench-", dir=directory)
    try:
        with Checkpointer(folder, keep=1, on_error="raise", signals=False) as checkpoints:
            seen: dict[bool, list[float]] = {False: [], True: []}
            stalls = []
            for repeat in range(-1, repeats):  # the first is a warm-up
                for saves in (False, True):
                    start = time.perf_counter()
                    if saves:
                        checkpoints.save_async(trainer)
                    steps()
                    if repeat >= 0:
                        seen[saves].append(time.perf_counter() - start)
                        stalls.append(checkpoints.stats.stall_s)
                    checkpoints.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    step_s = statistics.median(seen[False]) / block
    extra_s = statistics.median(seen[True]) - statistics.median(seen[False])
    return {
        "parameters": trainer.num_parameters,
        "step_s": step_s,
        "stall_s": statistics.median(stalls),
        "extra_s_of_a_save": extra_s,
        "slowdown_percent": 100 * extra_s / (100 * step_s),
    }


def render_checkpoint(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    size = result["bytes"]
    lines = [
        f"{size / 2**20:.0f} MiB, median of {result['repeats']}",
        f"{'':10} " + " ".join(f"{column:>18}" for column in ("stall", "write", "save", "load", "reload")),
    ]
    for name, row in result["seconds"].items():
        cells = []
        for key in ("stall_s", "write_s", "save_s", "load_s", "reload_s"):
            seconds = row.get(key)
            cells.append(f"{seconds:8.3f} s {size / seconds / 1e9:5.2f} GB/s" if seconds else "-")
        lines.append(f"{name:10} " + " ".join(f"{cell:>18}" for cell in cells))
    lines.append(f"memcpy     {result['seconds']['plain']['memcpy_s']:8.3f} s")
    for name, ratio in result["speed_ratios"].items():
        low, high = result["ranges"][name]
        lines.append(f"{name}: {ratio:.2f} ({low:.2f} to {high:.2f})")
    if "training" in result:
        row = result["training"]
        lines.append(
            f"training of {row['parameters'] / 1e6:.1f} M parameters: step {row['step_s']:.3f} s, stall"
            f" {row['stall_s']:.3f} s, a save costs {row['extra_s_of_a_save']:.3f} s:"
            f" {row['slowdown_percent']:.2f} % at one in 100 steps"
        )
    return lines
