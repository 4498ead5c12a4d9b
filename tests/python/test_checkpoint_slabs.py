"""Tensors that tensor parallelism cuts: any cut from any other, with ZeRO's flat cuts of what a rank holds."""

from __future__ import annotations

import math

import numpy as np
import polyreme as pr
import pytest
from helpers import alone, refused
from polyreme.checkpoint import ArrayPart, CheckpointFiles, read_manifest
from polyreme.checkpoint.directory import step_name
from polyreme.checkpoint.slab import Slab, flat_runs, uncovered
from polyreme.testing import run_ranks

# name: shape, dim that is cut, blocks of the dim
TENSORS = {
    "model/qkv": ((24, 5), 0, 3),
    "model/gate_up": ((16, 3), 0, 2),
    "model/proj": ((6, 16), 1, 1),
    "model/middle": ((3, 8, 2), 1, 2),
    "model/wte": ((10, 4), 0, 1),  # padded to 12 at tp = 4
    "model/norm": ((7,), None, 1),
    "optimizer/m/proj": ((6, 16), 1, 1),
}


def value(name):
    shape = TENSORS[name][0]
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1000 * list(TENSORS).index(name)


def ranges_of(extent, blocks, tp, rank):
    """What a rank holds of a dim: its share of each block, without padding."""
    width = extent // blocks
    share = -(-width // tp)
    own = [
        (b * width + min(rank * share, width), b * width + min((rank + 1) * share, width))
        for b in range(blocks)
    ]
    return [(a, b) for a, b in own if a < b]


def own_parts(rank, dp, tp, sharded, *, fill=True):
    """What a rank of dp x tp holds; with `sharded`, the run of it that ZeRO leaves to its place along dp."""
    parts = {}
    for name, (shape, dim, blocks) in TENSORS.items():
        whole = value(name)
        ranges = [] if dim is None else ranges_of(shape[dim], blocks, tp, rank % tp)
        held = whole if dim is None else np.take(whole, [i for a, b in ranges for i in range(a, b)], axis=dim)
        flat, begin = held.reshape(-1), 0
        if sharded:
            begin, end = (flat.size * r // dp for r in (rank // tp, rank // tp + 1))
            flat = flat[begin:end]
        array = flat.copy() if fill else np.full_like(flat, -1)
        parts[name] = ArrayPart(array, shape, begin, dim, ranges)
    return parts


LAYOUTS = [(1, 1, False), (1, 4, False), (2, 2, True), (1, 2, True), (4, 1, True), (2, 4, True)]


@pytest.mark.parametrize("writers", LAYOUTS)
def test_f77_any_cut_from_any_other(tmp_path, writers):
    def save(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            checkpoints._planner.min_cut_bytes = 64  # so that replicas share the writing of small tensors
            checkpoints.save(own_parts(world.rank, *writers), step=1)

    run_ranks(writers[0] * writers[1], save)
    files = CheckpointFiles(str(tmp_path), 1)
    assert sum(file.data_bytes for file in files.files) == sum(value(name).nbytes for name in TENSORS)
    assert files.manifest.tensors["model/wte"].shape == (10, 4)
    for name in TENSORS:
        assert files.read_tensor(name).tobytes() == value(name).tobytes()

    for dp, tp, sharded in LAYOUTS:

        def load(world, dp=dp, tp=tp, sharded=sharded):
            state = own_parts(world.rank, dp, tp, sharded, fill=False)
            with pr.Checkpointer(tmp_path, world=world) as checkpoints:
                checkpoints.load(state)
            for name, part in own_parts(world.rank, dp, tp, sharded).items():
                np.testing.assert_array_equal(state[name].array, part.array, err_msg=name)

        run_ranks(dp * tp, load)


def test_several_slabs_of_a_tensor_on_a_rank(tmp_path):
    """Lanes of tensor parallelism, each a tensor of its own: 4 of them on 1, 2, 4 ranks."""

    def lanes_of(world, *, fill=True):
        own = [own_parts(lane, 1, 4, False, fill=fill) for lane in range(4)]
        mine = own[4 * world.rank // world.size : 4 * (world.rank + 1) // world.size]
        return {
            name: [parts[name] for parts in mine] if dim is not None else mine[0][name]
            for name, (_, dim, _) in TENSORS.items()
        }

    for writers in (1, 2, 4):

        def save(world):
            with pr.Checkpointer(tmp_path / str(world.size), world=world) as checkpoints:
                checkpoints.save(lanes_of(world), step=1)

        run_ranks(writers, save)
        files = CheckpointFiles(str(tmp_path / str(writers)), 1)
        assert all(files.read_tensor(name).tobytes() == value(name).tobytes() for name in TENSORS)
        for readers in (1, 2, 4):

            def load(world, writers=writers):
                state = lanes_of(world, fill=False)
                with pr.Checkpointer(tmp_path / str(writers), world=world) as checkpoints:
                    checkpoints.load(state)
                for name, parts in lanes_of(world).items():
                    for found, part in zip(np.atleast_1d(state[name]), np.atleast_1d(parts), strict=True):
                        np.testing.assert_array_equal(found.array, part.array, err_msg=name)

            run_ranks(readers, load)


def test_the_package_reads_slabs(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    run_ranks(
        2,
        lambda world: pr.Checkpointer(tmp_path, world=world).save(own_parts(world.rank, 1, 2, False), step=1),
    )
    whole = {}
    for record in read_manifest(tmp_path, 1).files:
        whole |= safetensors.load_file(tmp_path / step_name(1) / record.name)
    np.testing.assert_array_equal(whole["model/proj{1:8-16}"], value("model/proj")[:, 8:])
    np.testing.assert_array_equal(
        whole["model/qkv{0:0-4,8-12,16-20}"], value("model/qkv").reshape(3, 2, 4, 5)[:, 0].reshape(12, 5)
    )


def test_slabs_that_overlap_and_slabs_that_do_not_cover(tmp_path):
    """Replicated heads are on several ranks; what nobody has is refused on all."""
    shape = (6, 3)
    whole = np.arange(18, dtype=np.float32).reshape(shape)
    own = [[(0, 2), (4, 5)], [(2, 4), (4, 6)], [(0, 1), (5, 6)]]

    def part(rank):
        rows = [i for a, b in own[rank] for i in range(a, b)]
        return {"w": ArrayPart(whole[rows].copy(), shape, dim=0, ranges=own[rank])}

    def body(world):
        with pr.Checkpointer(tmp_path, world=world) as checkpoints:
            checkpoints.save(part(world.rank), step=1)
            state = {"w": np.zeros(shape, np.float32)}
            checkpoints.load(state)
            np.testing.assert_array_equal(state["w"], whole)
            words = ["tensor 'w'", "nobody has index 2 of dim 0"]
            refused(pr.InvalidArgument, words, lambda: checkpoints.save(part(2 * world.rank), step=2))

    run_ranks(2, body)


def test_runs_are_those_of_numpy():
    random = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(random.integers(1, 7, random.integers(1, 4)))
        dim = int(random.integers(len(shape)))
        cuts = np.unique(random.integers(0, shape[dim] + 1, 6))
        slab = Slab.of(dim, list(zip(cuts[0:-1:2], cuts[1::2], strict=False)), shape)
        flat = np.arange(math.prod(shape)).reshape(shape)
        if slab is not None:
            assert slab.fits(shape)
            assert Slab.parse(str(slab)) == slab
            flat = np.take(flat, [i for a, b in slab.ranges for i in range(a, b)], axis=dim)
            assert flat.shape == slab.shape(shape)
        flat = flat.reshape(-1)
        begin, end = sorted(random.integers(0, flat.size + 1, 2))
        found = [
            i for first, count in flat_runs(slab, shape, begin, end) for i in range(first, first + count)
        ]
        assert found == flat[begin:end].tolist()


def test_texts_that_are_no_slab():
    for text in ("", "0", "0:", ":", "0:1", "0:2-1", "0:1-1", "0:1-3,2-4", "0:3-4,1-2", "x:1-2", "0:1-2,"):
        assert (Slab.parse(text) is None) == (text != "0:"), text
    assert (
        uncovered([Slab(0, ((0, 2),)), Slab(1, ((0, 2),))], (2, 2))
        == "it is cut along dims [0, 1]; expected one"
    )
    assert uncovered([Slab(0, ((0, 1),))], (2, 2)) == "nobody has index 1 of dim 0"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(dim=2, ranges=[(0, 1)]), ["dim 2", "(4, 2)"]),
        (dict(dim=0, ranges=[(0, 5)]), ["range 0 to 5", "inside of 4"]),
        (dict(dim=0, ranges=[(2, 4), (0, 1)]), ["range 0 to 1", "ascending"]),
        (dict(dim=0, ranges=[(0, 1)]), ["elements 0 to 4 of 0:0-1", "which has 2"]),
        (dict(ranges=[(0, 1)]), ["without dim"]),
        (dict(dim=0, ranges=[3]), ["'w'"]),
        (dict(shape=(2, 2)), ["two tensors are named 'w'"]),
    ],
)
def test_arguments(tmp_path, options, words):
    part = ArrayPart(np.zeros(4, np.float32), **{"shape": (4, 2), **options})
    checkpoints = pr.Checkpointer(tmp_path, world=alone())
    refused(pr.InvalidArgument, words, lambda: checkpoints.save({"w": [part, part]}, step=1))


def test_names_that_look_like_slabs(tmp_path):
    checkpoints = pr.Checkpointer(tmp_path, world=alone())
    state = {name: np.zeros(2) for name in ("a{}", "a{b}", "a{1,2}", "{0}")}
    checkpoints.save(state, step=1)
    for name in ("a{0:1-2}", "a{0:}[1:2]", "a[1:2]"):
        refused(
            pr.InvalidArgument, [repr(name)], lambda name=name: checkpoints.save({name: np.zeros(2)}, step=2)
        )
