"""Axes over ranks: who is in which group, in which order, and what cannot be asked for."""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np
import polyreme as pr
import pytest
from helpers import alone, polyreme, refused
from polyreme.testing import run_ranks

CUBE = dict(pp=2, dp=2, tp=2)


class Spread(pr.World):
    """A world whose ranks were dealt to hosts."""

    def __init__(self, world, hosts):
        super().__init__(world._core)
        self._hosts = list(hosts)

    @property
    def hosts(self):
        return self._hosts


def collect(size, function, hosts=None):
    """function(world) of every rank; with `hosts`, a letter for each rank's host."""
    return run_ranks(size, lambda world: function(Spread(world, hosts) if hosts else world))


# ---- ranks, groups and their order ----


def members(order, sizes, rank, axes):
    """The documented formula, by hand: a rank is the number whose digits are its coordinates."""

    def number(digits):
        value = 0
        for axis in order:
            value = value * sizes[axis] + digits[axis]
        return value

    every = [dict(zip(order, c, strict=True)) for c in itertools.product(*(range(sizes[a]) for a in order))]
    own = next(digits for digits in every if number(digits) == rank)
    return [number(d) for d in every if all(d[axis] == own[axis] for axis in order if axis not in axes)]


@pytest.mark.parametrize("order", [("tp", "dp", "pp"), ("dp", "tp", "pp"), ("pp", "dp", "tp")])
def test_o_pg_05_groups_are_those_of_the_formula(order):
    sizes = dict(tp=2, dp=2, pp=2)

    def run(world):
        mesh = pr.Mesh(world, **CUBE, order=("cp", *order, "ep"), groups=[("tp", "dp"), ("dp", "pp")])
        for axes in ("dp",), ("tp",), ("pp",), ("dp", "tp"), ("dp", "pp"), order, ("dp", "cp"):
            group = mesh[axes]
            assert group.ranks == members(order, sizes, world.rank, axes)
            expected = sum(10.0**rank for rank in group.ranks)
            assert group.all_reduce(np.array([10.0**world.rank]))[0] == expected
        return [mesh.coordinate(axis) for axis in order]

    assert run_ranks(8, run) == [list(c) for c in itertools.product(range(2), repeat=3)]


def test_tp_is_innermost_by_default():
    def run(world):
        mesh = pr.Mesh(world, **CUBE)
        assert mesh.order == pr.Mesh.AXES == ("pp", "dp", "cp", "ep", "tp")
        assert repr(mesh) == "Mesh(pp=2, dp=2, cp=1, ep=1, tp=2)"
        assert mesh.ranks == list(range(8))
        return mesh["tp"].ranks, mesh["dp"].ranks, mesh["pp"].ranks

    assert run_ranks(8, run)[5] == ([4, 5], [5, 7], [1, 5])


def test_dp_is_what_the_others_leave():
    def run(world):
        return pr.Mesh(world, tp=3).size("dp"), pr.Mesh(world, pp=2, tp=3)["dp"].ranks

    assert run_ranks(6, run) == [(2, [rank]) for rank in range(6)]


@pytest.mark.mp
def test_groups_between_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import polyreme as pr
world = pr.init(init_timeout_s=20, timeout_s=20)
mesh = pr.Mesh(world, pp=2, tp=2, groups=[("pp", "tp")])
assert len(set(world.hosts)) == 1 and len(world.hosts) == 4
for axes, ranks in ("tp", [[0, 1], [2, 3]]), ("pp", [[0, 2], [1, 3]]), (("pp", "tp"), [[0, 1, 2, 3]]):
    assert mesh[axes].ranks in ranks
    assert mesh[axes].all_reduce([world.rank])[0] == sum(mesh[axes].ranks)
""")
    done = polyreme("run", "-n", 4, script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_axes_of_size_one_make_no_difference(world):
    mesh = pr.Mesh(world)
    for axes in ("dp", "tp", ("dp", "cp"), ("pp", "tp"), pr.Mesh.AXES):
        assert mesh[axes].ranks == [0]
        assert mesh[axes].all_reduce([3.0])[0] == 3.0


def test_o_pg_03_the_order_of_first_use_is_free():
    def run(world):
        mesh = pr.Mesh(world, **CUBE, groups=[("dp", "tp")])
        use = ["dp", "tp", ("dp", "tp")]
        for axes in use if mesh.coordinate("pp") else reversed(use):
            assert mesh[axes].all_reduce([1])[0] == mesh[axes].size

    run_ranks(8, run)


def test_a_group_that_was_not_declared():
    def run(world):
        mesh = pr.Mesh(world, **CUBE)
        assert mesh["dp", "cp"].size == 2
        assert mesh["pp", "dp", "tp"].size == 8
        return refused(
            pr.InvalidArgument, ["pp and tp", 'groups=[("pp", "tp")]', "collective"], lambda: mesh["tp", "pp"]
        )

    run_ranks(8, run)


def test_unknown_axes(world):
    mesh = pr.Mesh(world)
    for ask in (mesh.size, mesh.coordinate, mesh.__getitem__):
        refused(pr.InvalidArgument, ["'dq'", "dp"], lambda ask=ask: ask("dq"))
    refused(pr.InvalidArgument, ["dp is named twice"], lambda: mesh["dp", "dp"])


def test_f40_ranks_that_ask_for_different_meshes():
    def run(world):
        sizes = dict(dp=2, tp=2) if world.rank == 3 else dict(dp=4)
        return refused(pr.CollectiveMismatch, ["'dp=4'", "'dp=2 x tp=2'"], lambda: pr.Mesh(world, **sizes))

    run_ranks(4, run)


# ---- sizes and options that cannot be ----


@pytest.mark.parametrize(
    "size, sizes, words",
    [
        (8, dict(dp=3, tp=2), ["dp=3 x tp=2 x pp=1 = 6", "8 ranks", "for example dp=4, tp=2 or dp=2, tp=4"]),
        (
            8,
            dict(tp=3),
            [
                "tp=3 x pp=1 = 3",
                "does not divide the world's 8 ranks",
                "for example dp=2, tp=4 or dp=4, tp=2",
            ],
        ),
        (6, dict(dp=1, pp=4), ["pp=4", "= 4, but", "6 ranks", "for example dp=1, pp=6 or dp=2, pp=3"]),
        (
            4,
            dict(dp=4, tp=4, pp=4),
            ["= 64, but the world has 4 ranks", "for example dp=1, pp=4 or dp=1, tp=4"],
        ),
        (1, dict(dp=3), ["dp=3 x tp=1 x pp=1 = 3", "has 1 rank;", "for example dp=1"]),
        (1, dict(dp=1 << 40, tp=1 << 40), [f"= {1 << 80}", "for example dp=1"]),
    ],
)
def test_f13_sizes_that_are_not_the_world(size, sizes, words):
    def run(world):
        if world.rank == 0:  # alone: the others never come
            start = time.monotonic()
            refused(pr.InvalidArgument, words, lambda: pr.Mesh(world, **sizes))
            assert time.monotonic() - start < 30  # it did not wait for them

    run_ranks(size, run)


def test_the_proposed_layouts_are_layouts(world):
    from polyreme.mesh import _check_sizes

    for num_ranks, dp, tp, pp in itertools.product(range(1, 25), (None, 1, 2, 3), range(1, 6), range(1, 6)):
        try:
            sizes = _check_sizes(num_ranks, dict(dp=dp, tp=tp, pp=pp, cp=1, ep=1))
        except pr.InvalidArgument as error:
            proposals = str(error).partition("for example ")[2].split(" or ")
            for text in proposals:
                sizes = dict(part.split("=") for part in text.split(", "))
                assert np.prod([int(n) for n in sizes.values()]) == num_ranks
        else:
            assert np.prod(list(sizes.values())) == num_ranks


@pytest.mark.parametrize("axis, feature", [("cp", "context parallelism"), ("ep", "expert parallelism")])
def test_axes_of_later_versions(world, axis, feature):
    words = [f"{axis}=2", feature, "not implemented yet", "dp=1"]
    refused(pr.NotAvailable, words, lambda: pr.Mesh(world, **{axis: 2}))


@pytest.mark.parametrize("axis", pr.Mesh.AXES)
def test_sizes_are_positive(world, axis):
    for size in (0, -1):
        refused(
            pr.InvalidArgument,
            [f"{axis}={size}", "at least 1"],
            lambda size=size: pr.Mesh(world, **{axis: size}),
        )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"order": ("dp", "tp")}, ["order=('dp', 'tp')", "exactly once", "('pp', 'dp', 'cp', 'ep', 'tp')"]),
        ({"order": ("pp", "dp", "cp", "ep", "ep")}, ["exactly once"]),
        ({"order": ("pp", "dp", "cp", "ep", "tp", "tp")}, ["exactly once"]),
        ({"order": "dp"}, ["order='dp'", "exactly once"]),
        ({"order": 3}, ["order=3", "exactly once"]),
        ({"order": [["dp"], 1]}, ["exactly once"]),
        ({"topology": "rack"}, ["'rack'", "launch or host"]),
        ({"topology": None}, ["topology=None", "'launch' or 'host'"]),
        ({"groups": ("pp", "tp")}, ["groups=('pp', 'tp')", '[("pp", "tp")]']),
        ({"groups": "pp"}, ["groups='pp'", '[("pp", "tp")]']),
        ({"groups": 3}, ["groups=3"]),
        ({"groups": [("pp", "pp")]}, ["different axes"]),
        ({"groups": [("pp", "dq")]}, ["'dq'", "pp, dp, cp, ep, tp"]),
        ({"groups": [()]}, ["groups=[()]"]),
    ],
)
def test_options_that_mean_nothing(world, options, words):
    refused(pr.InvalidArgument, words, lambda: pr.Mesh(world, **options))


# ---- hosts ----


def test_hosts_of_a_world(world):
    assert len(world.hosts) == 1
    assert len(set(run_ranks(3, lambda world: tuple(world.hosts))[2])) == 1


def test_topology_host_keeps_tp_within_a_host_where_ranks_were_dealt_round_robin(caplog):
    def run(world):
        mesh = pr.Mesh(world, tp=2, dp=2, topology="host", groups=[("dp", "tp")])
        assert mesh.ranks == mesh["dp", "tp"].ranks == [0, 2, 1, 3]
        assert mesh["dp", "tp"].all_reduce([world.rank])[0] == 6
        return mesh["tp"].ranks, mesh["dp"].ranks

    tp, dp = zip(*collect(4, run, "abab"), strict=True)
    assert tp == ([0, 2], [1, 3], [0, 2], [1, 3])
    assert dp == ([0, 1], [0, 1], [2, 3], [2, 3])
    assert not caplog.records


def test_topology_launch_warns_once_if_tp_is_not_within_a_host(caplog):
    with caplog.at_level(logging.WARNING, "polyreme"):
        collect(4, lambda world: pr.Mesh(world, tp=2), "abab")
    (record,) = caplog.records
    for word in ("tp=2", "ranks 0 (host a), 1 (host b)", "topology='host'"):
        assert word in record.getMessage()
    caplog.clear()
    collect(4, lambda world: pr.Mesh(world, tp=2), "aabb")
    collect(4, lambda world: pr.Mesh(world, dp=4), "abab")
    assert not caplog.records


def test_topology_host_refuses_a_tp_that_does_not_fit():
    words = [
        "tp=2",
        "ranks 2 (host a), 3 (host b)",
        "multiple of tp=2,",
        "host a has 3",
        "topology='launch'",
    ]

    def run(world):
        if world.rank == 0:  # alone
            refused(pr.InvalidArgument, words, lambda: pr.Mesh(world, tp=2, topology="host"))

    collect(6, run, "aaabbb")


def test_topology_host_counts_what_lies_inside_tp():
    def run(world):
        order = ("pp", "cp", "ep", "tp", "dp")
        if world.rank == 0:
            refused(
                pr.InvalidArgument,
                ["multiple of tp=2 x dp=2 = 4", "host a has 2"],
                lambda: pr.Mesh(world, tp=2, dp=2, order=order, topology="host"),
            )

    collect(4, run, "aabb")


# ---- sub-meshes ----


def test_a_sub_mesh_has_the_remaining_axes():
    def run(world):
        mesh = pr.Mesh(world, **CUBE)
        stage = mesh.coordinate("pp")
        sub = mesh.sub(pp=stage)
        assert repr(sub) == f"Mesh(pp=2, dp=2, cp=1, ep=1, tp=2).sub(pp={stage})"
        assert sub.order == ("dp", "cp", "ep", "tp")
        assert sub.ranks == list(range(4 * stage, 4 * stage + 4))
        assert (sub.size("tp"), sub.coordinate("tp")) == (2, world.rank % 2)
        assert sub["dp"].ranks == mesh["dp"].ranks
        assert sub["dp", "cp"].all_reduce([1.0])[0] == 2.0
        assert mesh.sub(pp=stage, dp=mesh.coordinate("dp")).ranks == mesh["tp"].ranks
        assert mesh.sub().ranks == mesh.ranks
        for ask in (sub.size, sub.coordinate, sub.__getitem__):
            refused(
                pr.InvalidArgument, [f"pp is fixed at {stage}", "dp, cp, ep, tp"], lambda ask=ask: ask("pp")
            )

    run_ranks(8, run)


def test_o_pg_04_a_sub_mesh_of_others():
    def run(world):
        mesh = pr.Mesh(world, **CUBE)
        if world.rank == 5:
            words = ["rank 5 has pp=1, tp=1", "sub-mesh pp=0, tp=1", "ranks [1, 3]"]
            refused(pr.InvalidArgument, words, lambda: mesh.sub(pp=0, tp=1))
        if mesh.coordinate("pp") == 0:  # its members are not disturbed
            assert mesh.sub(pp=0)["dp"].all_reduce([1.0])[0] == 2.0

    run_ranks(8, run)


def test_sub_meshes_that_are_not_there():
    mesh = pr.Mesh(alone())
    refused(pr.InvalidArgument, ["'dq'", "dp"], lambda: mesh.sub(dq=0))
    refused(pr.InvalidArgument, ["sub: pp=1", "0 to 0"], lambda: mesh.sub(pp=1))
    refused(pr.InvalidArgument, ["sub: pp=-1"], lambda: mesh.sub(pp=-1))
    refused(pr.InvalidArgument, ["sub: pp='0'", "integer"], lambda: mesh.sub(pp="0"))
