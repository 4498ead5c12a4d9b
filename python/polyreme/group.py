"""Collectives over the arrays of a script: `mesh["dp"].all_reduce(array)`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arrays import plain, readable
from .checks import check_int, check_timeout, check_type
from .errors import InvalidArgument

if TYPE_CHECKING:
    from .mesh import Mesh

__all__ = ["Group", "Work"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def _by_one_thread(
    method: Callable[Concatenate[Group, Arguments], Result],
) -> Callable[Concatenate[Group, Arguments], Result]:
    @functools.wraps(method)
    def call(group: Group, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with group._mesh.world._calls(method.__name__):
            return method(group, *args, **kwargs)

    return call


class Work(Generic[Result]):
    """A collective in flight. The arrays it works on must be left alone until `wait` returns."""

    def __init__(self, core: _core.Work, result: Result, group: Group) -> None:
        self._core = core
        self._result = result
        self._group = group  # the world it runs in must not end before

    def wait(self) -> Result:
        """Blocks until the result is in place, and returns it. Other Python threads run meanwhile.

        Raises:
            Timeout, PeerLost, CollectiveMismatch: the group cannot be used any more.
        """
        self._core.wait()
        return self._result


class Group:
    """The ranks that differ from this one along some axes alone: `mesh["dp"]`.

        total = mesh["dp"].all_reduce(array)                       # a new array
        mesh["dp"].all_reduce(array, out=array)                    # in place
        work = mesh["dp"].all_reduce(array, out=array, wait=False) # in flight
        work.wait()

    ranks: the members in order of their position in the mesh. Every rank or root in the methods below
        is a place in this list, as are the slices of results.

    Arrays are NumPy's, or whatever speaks DLPack on the CPU (PyTorch, JAX): bool, int8, uint8, int32,
    int64, float16, bfloat16, float32, float64. What is only read may have any strides (a contiguous copy
    is made); what is written must be contiguous, and is written in place. Where `out` is not given the
    result is a new NumPy array. Every member must make the same calls in the same order.

    No gradient flows through a collective: of a tensor that requires gradients the values are read, or written, as
    of its `detach()`; nothing is recorded, and a result requires none. The backward of a collective is for the
    caller to call: of an all-gather a reduce-scatter, of an all-reduce an all-reduce.

    Reductions are "sum", "product", "max", "min" or "average" (floating point only), in one fixed order:
    the bits are the same on every member, backend and layout. float16 and bfloat16 are reduced in float32
    and rounded once.

    All collectives of a rank, whatever their groups, run one after the other in the order of its calls. So two
    ranks that share several groups must make their calls in one order over all of these groups, and from one
    thread (a call while another thread of the rank is inside of one is refused); which group is used first does
    not matter.

    All methods raise InvalidArgument before anything is sent; CollectiveMismatch, naming who called what,
    before memory is written; PeerLost and Timeout, naming the ranks.

    Signal handlers of Python run while the main thread waits. One that raises, as that of Ctrl-C does, ends
    the wait: the group cannot be used any more, and its other members get PeerLost with the reason. Handlers
    must not use the group themselves.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self._mesh = mesh
        self.axes = axes
        self.ranks: list[int] = mesh._core.members(axes)
        self._core = _core.Group(mesh.world._core, mesh._core, axes)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self._core.rank

    @contextlib.contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Names the collectives of a block in the journal: `with group.label("layer 3 grads"):`.

        text: its first 32 bytes are kept.
        """
        check_type("label", text, str, "a text")
        self._core.set_label(text)
        try:
            yield
        finally:
            self._core.set_label("")

    @_by_one_thread
    def all_reduce(self, array: Any, op: str = "sum", *, out: Any = None, wait: bool = True) -> Any:
        """Everybody's `array`, reduced, of as many elements on all members.

        Where `out` is another array than `array`, it is a copy of it before anything is sent.

        Returns: the result (`out`, or a new array), or its `Work` if not `wait`.
        """
        if out is None:
            out = _copy("all_reduce: array", array)
        elif out is not array:
            array = np.asarray(plain(array))
            _require_shape("all_reduce", out, array.shape)
            if getattr(out, "dtype", None) != array.dtype:
                raise InvalidArgument(
                    f"all_reduce: out is of {getattr(out, 'dtype', type(out).__name__)}, the array of {array.dtype};"
                    " they must be equal"
                )
            out[...] = array
        return self._finish(self._core.all_reduce(plain(out), _check_op("all_reduce", op)), out, wait)

    @_by_one_thread
    def reduce_scatter(self, array: Any, op: str = "sum", *, out: Any = None, wait: bool = True) -> Any:
        """Everybody's `array`, reduced, of which each member gets its equal part along the first dim.

        Returns: as all_reduce, of shape [array.shape[0] / size, ...].
        """
        array = readable(array)
        rows = self._rows_each("reduce_scatter", array)
        out = _output("reduce_scatter", out, array, (rows, *array.shape[1:]))
        work = self._core.reduce_scatter(array, plain(out), _check_op("reduce_scatter", op))
        return self._finish(work, out, wait)

    @_by_one_thread
    def all_gather(
        self, array: Any, *, rows: Sequence[int] | None = None, out: Any = None, wait: bool = True
    ) -> Any:
        """Everybody's `array`, one after the other along the first dim, in the order of the members.

        Args:
            rows: where the members' arrays differ in their first dim, those sizes; the same on all.

        Returns: as all_reduce, of shape [sum of the first dims, ...].
        """
        array = readable(array)
        width = math.prod(array.shape[1:])
        rows = None if rows is None else self._check_rows("all_gather: rows", rows)
        counts = [] if rows is None else [n * width for n in rows]
        total = self.size * array.shape[0] if rows is None else sum(rows)
        out = _output("all_gather", out, array, (total, *array.shape[1:]))
        return self._finish(self._core.all_gather(array, plain(out), counts), out, wait)

    @_by_one_thread
    def broadcast(self, array: Any, root: int = 0, *, wait: bool = True) -> Any:
        """Member `root`'s array into everybody's `array`, in place.

        Returns: `array`, or its `Work` if not `wait`.
        """
        root = self._check_member("broadcast: root", root)
        return self._finish(self._core.broadcast(plain(array), root), array, wait)

    @_by_one_thread
    def all_to_all(
        self,
        array: Any,
        *,
        send_rows: Sequence[int] | None = None,
        receive_rows: Sequence[int] | None = None,
        out: Any = None,
        wait: bool = True,
    ) -> Any:
        """Part i of `array`, along the first dim, to member i; the parts for this one in order of members.

        Args:
            send_rows, receive_rows: sizes of the parts in the first dim, where they are not equal. What
                one sends to another must be what that one expects from it.

        Returns: as all_reduce.
        """
        array = readable(array)
        if (send_rows is None) != (receive_rows is None):
            raise InvalidArgument(
                "all_to_all: send_rows and receive_rows come together; one of them is missing"
            )
        width = math.prod(array.shape[1:])
        if send_rows is None or receive_rows is None:
            self._rows_each("all_to_all", array)
            sends, receives, total = [], [], array.shape[0]
        else:
            receive_rows = self._check_rows("all_to_all: receive_rows", receive_rows)
            sends = [n * width for n in self._check_rows("all_to_all: send_rows", send_rows)]
            receives = [n * width for n in receive_rows]
            total = sum(receive_rows)
        out = _output("all_to_all", out, array, (total, *array.shape[1:]))
        return self._finish(self._core.all_to_all(array, plain(out), sends, receives), out, wait)

    def send(self, array: Any, to: int, *, wait: bool = True) -> Any:
        """Sends `array` to another member, which calls `receive`. Returns None, or a `Work`."""
        return self.exchange(sends=[(array, to)], wait=wait)

    def receive(self, out: Any, source: int, *, wait: bool = True) -> Any:
        """Receives into `out`, of the shape and dtype that `source` sends. Returns None, or a `Work`."""
        return self.exchange(receives=[(out, source)], wait=wait)

    @_by_one_thread
    def exchange(
        self,
        *,
        sends: Sequence[tuple[Any, int]] = (),
        receives: Sequence[tuple[Any, int]] = (),
        wait: bool = True,
    ) -> Any:
        """Several sends and receives that depend on each other, at once.

        Only the members concerned call it. The n-th array sent to a member is the n-th it receives from
        this one. Two members that first send and then receive in calls of their own may wait for each
        other for ever; in one exchange they do not.

        Args:
            sends, receives: pairs of an array and the other member.

        Returns: None, or its `Work` if not `wait`.
        """
        to = [
            (readable(array), self._check_member("exchange: receiver", peer))
            for array, peer in _check_pairs("sends", sends)
        ]
        source = [
            (plain(array), self._check_member("exchange: sender", peer))
            for array, peer in _check_pairs("receives", receives)
        ]
        return self._finish(self._core.exchange(to, source), None, wait)

    @_by_one_thread
    def barrier(self, timeout_s: float = 600.0) -> None:
        """Waits until every member has called it.

        Raises:
            Timeout: after `timeout_s`, naming the missing ones.
        """
        self._core.barrier(check_timeout("barrier: timeout_s", timeout_s))

    def _finish(self, core: _core.Work, result: Any, wait: bool) -> Any:
        work = Work(core, result, self)
        return work.wait() if wait else work

    def _check_member(self, what: str, place: int) -> int:
        try:
            return check_int(what, place, 0, self.size - 1)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{error}; a place among the members of group {self._core.name!r}, ranks {self.ranks}"
            ) from None

    def _check_rows(self, what: str, rows: Sequence[int]) -> list[int]:
        if not isinstance(rows, Iterable):
            raise InvalidArgument(f"{what} is {rows!r}; expected a sequence of one number for each member")
        rows = list(rows)
        if len(rows) != self.size:
            raise InvalidArgument(
                f"{what} has {len(rows)} entries; expected one for each of the {self.size} members"
            )
        return [check_int(what, n, 0) for n in rows]

    def _rows_each(self, what: str, array: Any) -> int:
        if not array.shape:
            raise InvalidArgument(f"{what}: the array has no dims; expected one at least")
        rows = array.shape[0]
        if rows % self.size:
            raise InvalidArgument(
                f"{what}: the first dim of {tuple(array.shape)} must be a multiple of the {self.size} members"
            )
        return int(rows) // self.size


def _check_op(what: str, op: Any) -> str:
    check_type(f"{what}: op", op, str, "sum, product, max, min or average")
    return str(op)


def _check_pairs(what: str, pairs: Any) -> list[tuple[Any, Any]]:
    try:
        return [(array, peer) for array, peer in pairs]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"exchange: {what} must be pairs of an array and the other member, as in {what}=[(array, 1)]"
        ) from None


def _copy(what: str, array: Any) -> NDArray[Any]:
    try:
        return np.array(plain(array), order="C")
    except Exception as error:  # each framework has its own
        raise InvalidArgument(
            f"{what}: NumPy cannot copy it ({error}); expected dense memory of the CPU, and of types that NumPy lacks"
            " (bfloat16) pass out=, which is written in place"
        ) from None


def _output(what: str, out: Any, like: Any, shape: tuple[int, ...]) -> Any:
    if out is not None:
        _require_shape(what, out, shape)
        return out
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    raise InvalidArgument(f"{what}: out= is needed for arrays other than NumPy's; expected shape {shape}")


def _require_shape(what: str, out: Any, shape: tuple[int, ...]) -> None:
    if not hasattr(out, "shape"):
        raise InvalidArgument(f"{what}: out is a {type(out).__name__}; expected an array of shape {shape}")
    if tuple(out.shape) != shape:
        raise InvalidArgument(f"{what}: out has shape {tuple(out.shape)}; expected {shape}")
