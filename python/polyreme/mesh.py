"""Named axes over the ranks of a world."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

from . import _core
from .checks import check_int, check_type
from .errors import InvalidArgument, NotAvailable
from .group import Group
from .layout import layout_to_verify
from .world import World

__all__ = ["Mesh", "SubMesh"]

_NOT_YET = {
    "cp": "context parallelism (attention over sequences that are cut between ranks)",
    "ep": "expert parallelism (layers of experts that are dealt out to ranks)",
}


class Mesh:
    """Named axes over the ranks of a world, and the groups along them. Collective.

        mesh = pr.Mesh(world, dp=2, tp=2)
        mesh["tp"].all_reduce(array)        # over the ranks that differ from this one in tp alone
        mesh["dp", "tp"].ranks              # a flattened group

    With the order (a, b, c), outermost first, the rank with coordinates (i, j, k) has the position
    (i * size(b) + j) * size(c) + k, and the members of every group are in order of position, however
    its axes are named. All groups are made here, so it does not matter which is used first.

    Args:
        dp: ranks of data parallelism; default: what the other axes leave.
        pp, tp: stages of the pipeline, parts of the tensors.
        cp, ep: 1 in this version.
        order: all axes, outermost first. Neighbouring ranks differ in the last one.
        topology: "launch": position = rank, as the launcher numbered them. "host": positions are dealt
            out host by host, so that the inner axes stay within a host wherever the sizes allow it, and
            a tp that does not is refused.
        groups: sets of axes for which a flattened group is made, such as [("pp", "tp")]. ("dp", "cp") and
            all axes together are always there.

    Raises:
        InvalidArgument: sizes that do not multiply to the world's size; shows the product and what would.
        NotAvailable: an axis above 1 that this version cannot use.
        CollectiveMismatch: ranks ask for different meshes.
    """

    AXES = ("pp", "dp", "cp", "ep", "tp")

    def __init__(
        self,
        world: World,
        *,
        dp: int | None = None,
        pp: int = 1,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        order: Sequence[str] = AXES,
        topology: str = "launch",
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        check_type("Mesh: world", world, World, "the polyreme.World that polyreme.init returns")
        if (layout := layout_to_verify()) is not None:
            dp, tp, pp = layout.dp, layout.tp, layout.pp
        sizes = _check_sizes(world.size, {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "ep": ep})
        order = _check_order(order)
        check_type("Mesh: topology", topology, str, "'launch' or 'host'")
        flattened = [("dp", "cp"), *_check_groups(groups)]
        self.world = world
        self._layout = _core.MeshLayout([(axis, sizes[axis]) for axis in order], world.hosts, topology)
        self._order = order
        self._check_hosts(topology)
        self._core = _core.Mesh(world._core, self._layout, flattened)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return self._order

    @property
    def ranks(self) -> list[int]:
        """All ranks in order of position."""
        return self._layout.group(self.world.rank, self._order)

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        return self._layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`."""
        return self._layout.coordinate(self.world.rank, axis)

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        names = axes if isinstance(axes, tuple) else (axes,)
        for name in names:
            check_type("mesh[...]", name, str, 'the name of an axis, such as mesh["dp"], or several')
        return Group(self, names)

    def sub(self, **fixed: int) -> SubMesh:
        """The part of the mesh with these coordinates, of which this rank must be: `mesh.sub(pp=0)`.

        A view: nothing is made or communicated, and other ranks need not call it.

        Raises:
            InvalidArgument: this rank has other coordinates; names its own and the members.
        """
        return SubMesh(self, fixed)

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{axis}={self.size(axis)}" for axis in self._order) + ")"

    def _check_hosts(self, topology: str) -> None:
        """tp talks all the time: over a network it is slow, which nobody should find out by accident."""
        span = self._layout.host_span("tp")
        if not span:
            return
        tp = self.size("tp")
        text = f"Mesh: a group of tp={tp} is not on one host: {span}"
        if topology == "launch":
            if self.world.rank == 0:
                logging.getLogger("polyreme").warning("%s; topology='host' places ranks host by host", text)
            return
        inner = self._order[self._order.index("tp") :]
        block = math.prod(self.size(axis) for axis in inner)
        factors = [f"{axis}={self.size(axis)}" for axis in inner if self.size(axis) > 1]
        product = " x ".join(factors) + (f" = {block}" if len(factors) > 1 else "")
        host, count = next((h, n) for h, n in Counter(self.world.hosts).items() if n % block)
        raise InvalidArgument(
            f"{text}. With topology='host' the ranks of every host must be a multiple of {product}, but"
            f" host {host} has {count}; choose another tp or order, start other numbers of ranks, or accept it with"
            " topology='launch'"
        )


class SubMesh:
    """A mesh with some axes fixed at this rank's coordinates. Made by `Mesh.sub`."""

    def __init__(self, mesh: Mesh, fixed: dict[str, int]) -> None:
        fixed = {axis: check_int(f"sub: {axis}", c, 0, mesh.size(axis) - 1) for axis, c in fixed.items()}
        own = {axis: mesh.coordinate(axis) for axis in fixed}
        if own != fixed:
            members = [
                rank
                for rank in mesh.ranks
                if all(mesh._layout.coordinate(rank, axis) == fixed[axis] for axis in fixed)
            ]
            raise InvalidArgument(
                f"sub: rank {mesh.world.rank} has {_text(own)}; the sub-mesh {_text(fixed)} is that of ranks"
                f" {members}; look at mesh.coordinate first, or take this rank's own, mesh.sub({_text(own)})"
            )
        self.mesh = mesh
        self._fixed = own

    @property
    def order(self) -> tuple[str, ...]:
        """The axes that are left, outermost first."""
        return tuple(axis for axis in self.mesh.order if axis not in self._fixed)

    @property
    def ranks(self) -> list[int]:
        """Its ranks in order of position."""
        return self.mesh._layout.group(self.mesh.world.rank, self.order)

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        return self.mesh.size(self._left(axis))

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`."""
        return self.mesh.coordinate(self._left(axis))

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        names = axes if isinstance(axes, tuple) else (axes,)
        return self.mesh[tuple(self._left(axis) for axis in names)]

    def __repr__(self) -> str:
        return f"{self.mesh!r}.sub({_text(self._fixed)})"

    def _left(self, axis: str) -> str:
        if axis in self._fixed:
            raise InvalidArgument(
                f"axis {axis} is fixed at {self._fixed[axis]} in this sub-mesh, which has {', '.join(self.order)};"
                " ask the mesh itself"
            )
        return axis


def _text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _check_sizes(num_ranks: int, given: dict[str, int | None]) -> dict[str, int]:
    """Sizes that multiply to the number of ranks, dp being the rest where it is None."""
    wanted = {
        axis: check_int(f"mesh axis {axis}", size, 1)
        for axis, size in given.items()
        if axis != "dp" or size is not None
    }
    for axis, feature in _NOT_YET.items():
        if wanted[axis] > 1:
            raise NotAvailable(
                f"mesh axis {axis}={wanted[axis]}: {feature} is not implemented yet; leave {axis}=1 and give its ranks"
                f" to dp, pp or tp, such as dp={num_ranks}"
            )
    product = math.prod(wanted.values())
    if "dp" not in wanted and num_ranks % product == 0:
        return {**wanted, "dp": num_ranks // product}
    if product == num_ranks:
        return wanted
    shown = " x ".join(f"{axis}={wanted[axis]}" for axis in ("dp", "tp", "pp") if axis in wanted)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    problem = f"but the world has {ranks}" if "dp" in wanted else f"which does not divide the world's {ranks}"
    raise InvalidArgument(
        f"Mesh: {shown} = {product}, {problem}; for example {' or '.join(_nearest(num_ranks, wanted))}"
    )


def _nearest(num_ranks: int, wanted: dict[str, int]) -> list[str]:
    """The two layouts of all ranks that change the least, dp rather than tp and pp; axes at 1 stay there."""
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    found = []
    for tp in divisors if wanted["tp"] > 1 else [1]:
        for pp in divisors if wanted["pp"] > 1 else [1]:
            if num_ranks % (tp * pp) == 0:
                sizes = {"dp": num_ranks // (tp * pp), "tp": tp, "pp": pp}
                changed = sum(sizes[axis] != wanted[axis] for axis in ("tp", "pp"))
                distance = sum(abs(math.log2(sizes[axis] / wanted.get(axis, sizes[axis]))) for axis in sizes)
                text = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if axis == "dp" or size > 1)
                found.append((changed, distance, text))
    return [text for _, _, text in sorted(found)[:2]]


def _check_order(order: Sequence[str]) -> tuple[str, ...]:
    if _counted(order) != Counter(Mesh.AXES):
        raise InvalidArgument(
            f"Mesh: order={order!r}; expected every axis exactly once, outermost first, such as {Mesh.AXES}"
        )
    return tuple(order)


def _check_groups(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    is_list = isinstance(groups, Sequence) and not isinstance(groups, str)
    if not is_list or not all(_counted(axes) and _counted(axes) <= Counter(Mesh.AXES) for axes in groups):
        raise InvalidArgument(
            f"Mesh: groups={groups!r}; expected a list of lists of different axes among {', '.join(Mesh.AXES)},"
            ' such as [("pp", "tp")]'
        )
    return [tuple(axes) for axes in groups]


def _counted(names: object) -> Counter[str]:
    """How often each name is in a list of names; empty for anything else."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        return Counter()
    return Counter(names) if all(isinstance(name, str) for name in names) else Counter()
