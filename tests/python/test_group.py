"""Collectives over arrays of a script. Ranks are threads; the bits are those of the C++ tests."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time

import numpy as np
import polyreme as pr
import pytest
from polyreme.testing import run_ranks

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"]


def ranks(size, function, **options):
    """function(world, group of all ranks) on `size` ranks."""
    return run_ranks(size, lambda world: function(world, pr.Mesh(world, dp=size)["dp"]), **options)


def refused(error, function, *parts):
    with pytest.raises(error) as caught:
        function()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("executor", ["immediate", "deferred"])
def test_every_operation_with_numpy(executor):
    def body(world, group):
        r, n = group.rank, group.size
        mine = np.arange(6, dtype=np.float32).reshape(6, 1) + r
        assert group.all_reduce(mine).tolist() == (3 * np.arange(6.0).reshape(6, 1) + 3).tolist()
        assert group.all_reduce(mine, "max").tolist() == (np.arange(6.0).reshape(6, 1) + 2).tolist()
        assert group.all_reduce(mine, "average").tolist() == (np.arange(6.0).reshape(6, 1) + 1).tolist()
        assert mine[0, 0] == r  # an input is never written
        assert group.reduce_scatter(mine).ravel().tolist() == [6 * r + 3, 6 * r + 6]
        assert group.all_gather(np.full((2, 2), r)).tolist() == [[i // 2] * 2 for i in range(2 * n)]
        uneven = group.all_gather(np.full((r, 2), r), rows=[0, 1, 2])
        assert uneven.tolist() == [[1, 1], [2, 2], [2, 2]]
        data = np.full(3, r)
        assert group.broadcast(data, root=2) is data
        assert data.tolist() == [2, 2, 2]
        assert group.all_to_all(np.array([10 * r, 10 * r + 1, 10 * r + 2])).tolist() == [r, 10 + r, 20 + r]
        rows = group.all_to_all(np.full(r + r + r, r), send_rows=[r] * 3, receive_rows=[0, 1, 2])
        assert rows.tolist() == [1, 2, 2]
        got = np.empty(4)
        group.exchange(sends=[(np.full(4, r * 1.0), (r + 1) % n)], receives=[(got, (r - 1) % n)])
        assert got.tolist() == [(r - 1) % n] * 4
        group.barrier(30)

    ranks(3, body, executor=executor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_every_dtype(dtype):
    def body(world, group):
        value = np.array([group.rank == 1, 1, 0], dtype)
        return group.all_reduce(value)

    for result in ranks(2, body):
        assert result.dtype == dtype
        assert result.tolist() == np.array([1, 1 if dtype == "bool" else 2, 0], dtype).tolist()


def test_in_flight_while_the_host_goes_on():
    started = threading.Event()

    def body(world, group):
        data = np.full(100_000, float(group.rank))
        if group.rank == 1:
            assert started.wait(30)  # never set if rank 0 were held in its call
        work = group.all_reduce(data, out=data, wait=False)
        started.set()
        assert work.wait() is data
        assert (data == 1).all()

    ranks(2, body)


CALLS = {  # what rank 0 waits in, and what rank 1 does late
    "all_reduce": [lambda group: group.all_reduce(np.ones(2))] * 2,
    "barrier": [lambda group: group.barrier()] * 2,
    "receive": [lambda group: group.receive(np.ones(2), 1), lambda group: group.send(np.ones(2), 0)],
}


@pytest.mark.parametrize("call", CALLS)
def test_o_fl_06_waiting_lets_other_python_threads_run(call):
    counts = []

    def body(world, group):
        if group.rank == 1:
            time.sleep(1.0)
            return CALLS[call][1](group)
        stop = threading.Event()

        def count():
            while not stop.wait(0.02):
                counts.append(1)

        counter = threading.Thread(target=count)
        counter.start()
        CALLS[call][0](group)
        stop.set()
        counter.join()

    ranks(2, body)
    assert len(counts) >= 20


@pytest.mark.torch
def test_o_pg_07_no_gradient_flows_through_a_collective():
    torch = pytest.importorskip("torch")

    def body(world, group):
        x = torch.full((2,), group.rank + 1.0, requires_grad=True)
        part = torch.full((1,), group.rank + 1.0, requires_grad=True)
        reduced, whole, out = group.all_reduce(x), torch.empty(2), torch.empty(1, requires_grad=True)
        group.all_gather(part, out=whole)
        group.reduce_scatter(x, out=out)
        assert (reduced.tolist(), whole.tolist(), out.tolist()) == ([3.0, 3.0], [1.0, 2.0], [3.0])
        assert not whole.requires_grad
        # The convention by hand: the gradient of sum(all_gather(part) ** 2), summed over the ranks.
        grad = torch.empty(1)
        group.reduce_scatter(2 * whole, out=grad)
        assert grad.tolist() == [[4.0], [8.0]][group.rank]
        # Written in place as under no_grad: still a leaf, that of the root.
        assert group.broadcast(x, root=1) is x
        assert (x.is_leaf, x.requires_grad, x.tolist()) == (True, True, [2.0, 2.0])
        (x**2).sum().backward()
        assert x.grad.tolist() == [4.0, 4.0]

    ranks(2, body)


@pytest.mark.torch
def test_torch_tensors_are_worked_on_in_place():
    torch = pytest.importorskip("torch")

    def body(world, group):
        data = torch.full((5,), group.rank + 1.5, dtype=torch.bfloat16)
        assert group.all_reduce(data, out=data) is data
        assert data.tolist() == [4.0] * 5
        gathered = torch.empty(4, dtype=torch.int64)
        group.all_gather(torch.tensor([group.rank, 7]), out=gathered)
        assert gathered.tolist() == [0, 7, 1, 7]
        refused(
            pr.InvalidArgument,
            lambda: group.all_reduce(torch.ones(2, 2).t()[:, :1], out=torch.ones(2)),
            "shape",
        )
        refused(pr.InvalidArgument, lambda: group.all_gather(torch.ones(2)), "out=")
        refused(pr.InvalidArgument, lambda: group.broadcast(torch.ones(2, dtype=torch.complex64)), "DLPack")
        strided = torch.ones(4, 2)[:, 0]
        refused(pr.InvalidArgument, lambda: group.broadcast(strided), "contiguous")

    ranks(2, body)


def test_o_sh_03_strided_arrays_are_read_right_and_never_written_wrong():
    def body(world, group):
        base = np.array([[group.rank + 1, 9], [group.rank + 1, 9]], np.float32)
        column = base[:, 0]
        assert group.all_reduce(column).tolist() == [3, 3]
        assert group.all_gather(column).tolist() == [1, 1, 2, 2]
        assert group.reduce_scatter(column).tolist() == [3]
        refused(pr.InvalidArgument, lambda: group.all_reduce(column, out=column), "contiguous")
        refused(pr.InvalidArgument, lambda: group.broadcast(column), "contiguous")
        assert base.tolist() == [[group.rank + 1, 9], [group.rank + 1, 9]]

    ranks(2, body)


def test_o_sh_04_reduce_scatter_of_a_transposed_array():
    def body(world, group):
        x = np.arange(24.0).reshape(4, 3, 2).swapaxes(1, 2)
        part = group.reduce_scatter(x)
        assert part.tolist() == (4 * x[group.rank : group.rank + 1]).tolist()
        return part

    assert ranks(4, body)[0].tolist() == [[[0, 8, 16], [4, 12, 20]]]


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_o_sh_07_odd_lengths(size):
    def body(world, group):
        for length in (1, 2, 3, 7, 1023):
            mine = np.arange(length) * (group.rank + 1)
            total = np.arange(length) * (size * (size + 1) // 2)
            assert (group.all_reduce(mine) == total).all()
            gathered = group.all_gather(mine).reshape(size, length)
            assert (gathered == np.arange(length) * np.arange(1, size + 1)[:, None]).all()
            wide = np.tile(mine, size)
            assert (group.reduce_scatter(wide) == total).all()
        if size == 3:
            rows = [0, 1, 5]
            got = group.all_gather(np.full(rows[group.rank], group.rank), rows=rows)
            assert got.tolist() == [1] + [2] * 5

    ranks(size, body)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_o_pg_01_average_of_integers_is_refused(dtype):
    def body(world, group):
        refused(pr.InvalidArgument, lambda: group.all_reduce(np.ones(2, dtype), "average"), "average", dtype)
        return group.all_reduce(np.ones(1))[0]

    assert ranks(2, body) == [2, 2]


def test_o_pg_06_a_root_outside_the_group_is_refused_with_the_members():
    def body(world):
        group = pr.Mesh(world, dp=2, tp=2)["tp"]
        refused(
            pr.InvalidArgument, lambda: group.broadcast(np.ones(1), root=2), "root", "2", str(group.ranks)
        )
        refused(pr.InvalidArgument, lambda: group.send(np.ones(1), to=-1), "-1", str(group.ranks))
        data = np.array([world.rank])
        group.broadcast(data, root=1)
        return data[0]

    assert run_ranks(4, body) == [1, 1, 3, 3]


@pytest.mark.parametrize("missing", [{2}, {1, 2}])
def test_o_pg_08_barrier_names_the_missing_ranks(missing):
    def body(world, group):
        if group.rank in missing:
            time.sleep(1.5)
            return ""
        with pytest.raises(pr.Timeout) as caught:
            group.barrier(timeout_s=0.5)
        return str(caught.value)

    for rank, text in enumerate(ranks(4, body)):
        if rank not in missing:
            assert all(f"rank {m} " in text for m in missing), text
            assert "rank 3 " not in text.split("waited")[1]
            assert "0.5 s" in text


def test_o_pg_09_a_refusal_and_a_failure_in_flight_reach_the_caller():
    def body(world, group):
        refused(
            pr.InvalidArgument, lambda: group.all_reduce(np.ones(2, np.complex64), wait=False), "complex64"
        )
        work = group.all_reduce(np.ones(2 + group.rank), wait=False)
        refused(pr.CollectiveMismatch, work.wait, "float64[2]", "float64[3]")

    ranks(2, body)


def usage():
    """Peak RSS in KiB, open files, threads of this process."""
    counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *counts


def test_o_pg_10_memory_does_not_grow():
    def body(world, group):
        for i in range(3000):
            size = (1 + i % 500) * 256
            work = group.all_reduce(np.ones(size, np.float32), wait=i % 2 == 0)
            group.all_gather(np.ones(size // 2, np.float32))
            if i % 2 == 1:
                work.wait()
            if i == 500 and group.rank == 0:
                gc.collect()
                before = usage()
        group.barrier(30)
        if group.rank == 0:
            after = usage()
            assert after[0] - before[0] < 20 << 10
            assert after[1] <= before[1]
            assert after[2] <= before[2]

    ranks(2, body)


def test_bad_arrays_are_refused_before_anything_is_sent():
    def body(world, group):
        fixed = np.ones(2)
        fixed.flags.writeable = False
        for function, parts in [
            (lambda: group.all_reduce(np.ones(2), "median"), ["median", "sum", "average"]),
            (lambda: group.all_reduce(np.ones(2), out=np.ones(3)), ["(3,)", "(2,)"]),
            (lambda: group.broadcast(fixed), ["read-only"] if group.rank else []),
            (lambda: group.broadcast([1.0, 2.0]), ["list"]),
            (lambda: group.reduce_scatter(np.ones(3)), ["(3,)", "multiple", "2"]),
            (lambda: group.all_gather(np.ones(3), rows=[1]), ["rows", "1 entries"]),
            (lambda: group.all_gather(np.ones(3), rows=[1, 1]), ["counts", "3"]),
            (lambda: group.all_to_all(np.ones(2), send_rows=[1, 1]), ["receive_rows"]),
            (lambda: group.send(np.ones(2), to=group.rank), [f"is {group.rank}"]),
            (lambda: group.all_reduce(np.ones(2).astype(">f8")), ["byte order"]),
        ]:
            if parts:
                refused(pr.InvalidArgument, function, *parts)
        group.barrier(20)

    ranks(2, body)


def test_f43_a_second_thread_is_refused():
    """Which call of another rank it would meet is left to chance."""

    def body(world, group):
        entered, refusals = threading.Event(), []

        def second():
            entered.wait()
            while not refusals:
                try:
                    group.all_reduce(np.full(4, 100.0))
                except pr.InvalidArgument as error:
                    refusals.append(str(error))

        if group.rank == 0:
            thread = threading.Thread(target=second)
            thread.start()
            with world._calls("all_reduce"):  # as long as it takes
                entered.set()
                thread.join()
            assert "inside of all_reduce" in refusals[0]
            assert "from one thread" in refusals[0]
        return group.all_reduce(np.full(4, group.rank + 1.0)).tolist()

    assert ranks(2, body) == [[3.0] * 4] * 2


def test_sizes_may_come_from_an_iterator():
    def body(world, group):
        mine = np.full((group.rank + 1, 2), group.rank)
        assert group.all_gather(mine, rows=iter([1, 2])).tolist() == [[0, 0], [1, 1], [1, 1]]
        sent = group.all_to_all(np.full(2, group.rank), send_rows=iter([1, 1]), receive_rows=iter([1, 1]))
        assert sent.tolist() == [0, 1]

    ranks(2, body)


def test_tensors_that_require_gradients_and_what_is_no_array():
    torch = pytest.importorskip("torch")

    def body(world, group):
        tensor = torch.ones(3, requires_grad=True)
        assert group.all_reduce(tensor).tolist() == [2.0] * 3
        out = np.empty(3, np.float32)
        assert group.all_reduce(tensor, out=out).tolist() == [2.0] * 3
        meta = torch.ones(3, device="meta")
        refused(pr.InvalidArgument, lambda: group.all_reduce(meta), "dense memory of the CPU")
        refused(pr.InvalidArgument, lambda: group.all_reduce(out, out=[0, 0]), "out is a list")
        refused(pr.InvalidArgument, lambda: pr.Mesh(world)[0], "the name of an axis")

    ranks(2, body)
