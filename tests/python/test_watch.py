"""Ranks that watch each other, and what their journals tell afterwards. Named after the faults of the catalogue.

Real processes under `polyreme run`, with the test settings of the catalogue: heartbeat 0.5 s, peer timeout
3 s, operation timeout 5 s.
"""

from __future__ import annotations

import contextlib
import json
import platform
import queue
import re
import signal
import socket
import textwrap
import threading
import time

import polyreme as pr
import pytest
from helpers import Ranks, alone, free_port, json_lines, polyreme, refused
from polyreme.comm_report import examine, render
from polyreme.journal import read_directory

pytestmark = pytest.mark.mp

HEAD = """
import json, os, signal, subprocess, time
import numpy as np
import polyreme as pr

world = pr.init(heartbeat_s=0.5, peer_timeout_s=3, timeout_s=5, init_timeout_s=20, num_threads=1)
group = pr.Mesh(world, dp=world.size)["dp"]

def reduce(label):
    with group.label(label):
        group.all_reduce(np.ones(4, np.float32))

def watch():
    "What a rank hears that computes and calls nobody."
    end = time.monotonic() + 20
    while not world.failure and time.monotonic() < end:
        time.sleep(0.01)
    raise pr.PeerLost(world.failure or "no failure")

def tell(**facts):
    print(json.dumps({"rank": world.rank, "pid": os.getpid(), **facts}), flush=True)

def run(body):
    "Says how the body fails, and fails by it."
    start = time.monotonic()
    try:
        body()
    except pr.CommError as error:
        tell(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - start)
        raise SystemExit(7)  # not an unhandled exception
"""


class Run:
    """One job of `num_ranks`, and its journals."""

    def __init__(self, folder, script, num_ranks=3, head=HEAD, survivor_grace=2):
        path, self.record = folder / "script.py", folder / "record"
        path.write_text(head + textwrap.dedent(script))
        options = ("--survivor-grace", survivor_grace, "--kill-after", 0.5, "--prefix", "never", "--json")
        self.done = polyreme("run", "-n", num_ranks, "--record-dir", self.record, *options, path)
        self.told = {line["rank"]: line for line in json_lines(self.done.stdout)}
        self.launch = next(line for line in json_lines(self.done.stderr) if line["event"] == "launch_report")

    def pid(self, rank):
        return next(entry["pid"] for entry in self.launch["ranks"] if entry["rank"] == rank)

    def verdict(self, ranks):
        """The text of all these ranks, which must be one, without where they were."""
        assert set(ranks) <= set(self.told), self.done.stderr
        texts = {re.sub(r"^group .*?, sequence \d+: ", "", self.told[rank]["error"]) for rank in ranks}
        assert len(texts) == 1, texts
        return texts.pop()

    def report(self):
        """What comm-report makes of the journals; for people, too."""
        report = examine(self.record)
        assert render(report)
        return json.loads(json.dumps(report.as_json()))


def test_the_journals_of_a_good_run(tmp_path):
    run = Run(
        tmp_path,
        """
        for n in range(20):
            reduce(f"step {n}")
        world.barrier()
        """,
    )
    assert run.done.returncode == 0, run.done.stderr
    report = run.report()
    assert (report["ok"], report["ranks"], report["not_closed"]) == (True, [0, 1, 2], [])
    assert report["stuck"] == report["mismatches"] == report["stalls"] == []
    assert sorted(lag["rank"] for lag in report["lags"]) == [0, 1, 2]
    assert {lag["operations"] for lag in report["lags"]} == {report["lags"][0]["operations"]}
    assert report["lags"][0]["operations"] >= 21

    assert run.record.stat().st_mode & 0o777 == 0o700
    (first, *_), skipped = read_directory(run.record)
    assert skipped == {}
    reductions = [op for op in first.operations if first.describe(op) == "all_reduce float32[4] sum"]
    assert [bytes(op["label"]) for op in reductions] == [f"step {n}".encode() for n in range(20)]
    assert {int(op["num_bytes"]) for op in reductions} == {16}
    assert all(op["enqueued_ns"] <= op["started_ns"] <= op["ended_ns"] for op in first.operations)


# Between the two halves of a ZeRO step: the gradients are reduced, the new weights have not been gathered.
def test_f19_a_rank_killed_between_reduce_scatter_and_all_gather(tmp_path):
    run = Run(
        tmp_path,
        """
        def body():
            for step in range(100):
                part = group.reduce_scatter(np.ones(world.size * 4, np.float32))
                if (world.rank, step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                group.all_gather(part)
                finished.append(step)
        finished = []
        try:
            body()
        except pr.CommError as error:
            tell(error=str(error), kind=type(error).__name__, finished=finished)
            raise SystemExit(7)
        """,
    )
    text = run.verdict([0, 2])
    assert f"rank 1 (host {socket.gethostname()}, pid {run.pid(1)})" in text
    assert {run.told[rank]["kind"] for rank in (0, 2)} == {"PeerLost"}
    assert [run.told[rank]["finished"] for rank in (0, 2)] == [[0, 1, 2]] * 2


# The interpreter calls the hook that was set last; ours is not even asked.
def test_an_exception_is_known_to_all_whatever_hook_was_set_afterwards(tmp_path):
    run = Run(
        tmp_path,
        """
        import sys
        sys.excepthook = lambda *of: print("mine", file=sys.stderr)
        reduce("first")
        if world.rank == 1:
            raise ValueError("boom")
        run(watch)
        """,
    )
    text = run.verdict([0, 2])
    assert text == f"rank 1 (host {socket.gethostname()}, pid {run.pid(1)}) failed: ValueError: boom"


JOIN = """
import json, time
import numpy as np
import polyreme as pr
try:
    world = pr.init(heartbeat_s=0.2, peer_timeout_s=1, timeout_s=20, init_timeout_s={limit}, num_threads=1)
    for _ in range(20):
        pr.Mesh(world)["dp"].all_reduce(np.ones(4))
        time.sleep(0.1)
    world.barrier()
    print(json.dumps({{"failure": world.failure}}))
except pr.CommError as error:
    print(json.dumps({{"error": str(error)}}))
"""


def test_f09_rank_0_tells_whom_it_refused(tmp_path):
    script = JOIN.format(limit=5)
    with Ranks([script, script], own={1: {"POLYREME_SECRET": "of another job"}}) as ranks:
        _, (told,), errors = ranks.end(0)
        assert "the store refused 1 connection that does not know the secret of this job" in told["error"], (
            told
        )
        assert "the last from 127.0.0.1:" in told["error"], told
        assert "the secret of this job" in errors, "said while it waits"
        _, (told,), _ = ranks.end(1)
        assert "secret" in told["error"], told


class SlowProxy:
    """Passes bytes on to a port of this host, 20 ms later, once somebody listens there."""

    def __init__(self, to_port, delay_s=0.02):
        self.port, self.to_port, self.delay_s = free_port(), to_port, delay_s
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            with contextlib.suppress(OSError), self._connect():
                break
            time.sleep(0.05)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", self.port)) as listener:
            while True:
                near, far = listener.accept()[0], self._connect()
                for source, target in ((near, far), (far, near)):
                    pipe = queue.Queue()
                    threading.Thread(target=self._read, args=(source, pipe), daemon=True).start()
                    threading.Thread(target=self._write, args=(pipe, target), daemon=True).start()

    def _connect(self):
        return socket.create_connection(("127.0.0.1", self.to_port))

    def _read(self, source, pipe):
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            pipe.put((time.monotonic() + self.delay_s, data))

    def _write(self, pipe, target):
        with contextlib.suppress(OSError):
            while True:
                due, data = pipe.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


# Heartbeats, the meeting and the verdict of a failure all go by the store.
def test_f50_a_store_behind_a_slow_proxy_is_no_dead_peer():
    port = free_port()
    proxy = SlowProxy(port)
    script = JOIN.format(limit=30)
    with Ranks(
        [script] * 3, own={1: {"MASTER_PORT": str(proxy.port)}}, MASTER_PORT=str(port), POLYREME_JOB_ID="slow"
    ) as ranks:
        for rank in range(3):
            code, told, errors = ranks.end(rank)
            assert (code, told) == (0, [{"failure": ""}]), errors


# Ends the process at its next system call of this number (SIGSYS).
DIE_AT = """
import ctypes, struct

def die_at(number):
    "After linux/filter.h: loads the number, compares it, kills or allows."
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, ctypes.addressof(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, filter
"""


# It has met the others, and dies before they have a group: nothing in the group can notice that.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize(
    ("transport", "call"), [("shm", 204), ("tcp", 50)], ids=["shm: sched_getaffinity", "tcp: listen"]
)
def test_a_rank_that_dies_before_the_group_is_open(tmp_path, transport, call):
    script = f"""
{DIE_AT}
import json, os, time
import polyreme as pr

if os.environ["RANK"] == "1":
    die_at({call})
start = time.monotonic()
try:
    pr.init(heartbeat_s=0.5, peer_timeout_s=3, timeout_s=60, init_timeout_s=60, num_threads=1, transport="{transport}")
except pr.CommError as error:
    print(json.dumps({{"rank": int(os.environ["RANK"]), "error": str(error), "kind": type(error).__name__}}), flush=True)
    raise SystemExit(7)
"""
    run = Run(tmp_path, script, head="")
    assert set(run.told) == {0, 2}, run.done.stderr
    for rank in (0, 2):
        assert run.told[rank]["kind"] == "PeerLost", run.told
        assert f"lost rank 1 (host {socket.gethostname()}, pid {run.pid(1)})" in run.told[rank]["error"]


@pytest.mark.parametrize("others", ["reduce('lost')", "watch()"])
def test_f22_an_exception_of_one_rank_is_the_error_of_all(tmp_path, others):
    run = Run(
        tmp_path,
        f"""
        reduce("first")
        if world.rank == 1:
            raise ValueError("boom")
        run(lambda: {others})
        """,
    )
    text = run.verdict([0, 2])
    assert text == f"rank 1 (host {socket.gethostname()}, pid {run.pid(1)}) failed: ValueError: boom"
    assert run.told[0]["kind"] == "PeerLost"
    assert 1 in run.launch["causes"]
    assert "ValueError: boom" in run.done.stderr
    report = run.report()
    assert not report["ok"]
    assert set(report["failures"]) == {text}
    assert 1 in report["failures"][text]


def test_f25_a_stopped_rank_is_named_as_stopped(tmp_path):
    run = Run(
        tmp_path,
        """
        reduce("first")
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        run(lambda: reduce("second"))
        """,
    )
    text = run.verdict([0, 1])
    assert f"rank 2 (host {socket.gethostname()}, pid {run.pid(2)}): no heartbeat for 3 s" in text
    assert text.endswith("; the process is stopped")
    report = run.report()
    assert not report["ok"]
    (stuck,) = report["stuck"]
    assert (stuck["operation"], stuck["label"]) == ("all_reduce float32[4] sum", "second")
    assert list(stuck["missing"]) == ["2"]
    assert "label 'first'" in stuck["missing"]["2"]["last"]
    assert stuck["missing"]["2"]["next"] == "nothing"
    assert all(seconds > 1 for seconds in stuck["waiting"].values())
    assert 2 in report["not_closed"]


def test_f26_a_short_stop_is_a_stall(tmp_path):
    run = Run(
        tmp_path,
        """
        reduce("first")
        if world.rank == 2:
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        run(lambda: reduce("second"))
        time.sleep(1)
        run(lambda: reduce("third"))
        tell(stalls=world._core.num_stalls, failure=world.failure)
        """,
    )
    assert run.done.returncode == 0, run.done.stderr
    assert {told["failure"] for told in run.told.values()} == {""}
    assert run.told[2]["stalls"] == 1
    report = run.report()
    assert report["ok"]
    (stall,) = [stall for stall in report["stalls"] if stall["rank"] == 2]
    assert 1.4 < stall["seconds"] < 3
    assert f"pid {run.pid(2)}) was not heard for" in stall["text"]
    lag = next(lag for lag in report["lags"] if lag["rank"] == 2)
    assert lag["max_ms"] > 1000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_f08_the_host_of_the_store_is_lost(tmp_path, number):
    run = Run(
        tmp_path,
        f"""
        reduce("first")
        if world.rank == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), {int(number)})
        run(watch)
        """,
    )
    text = run.verdict([1, 2])
    assert text.startswith(
        f"lost the store, host of rank 0 (host {socket.gethostname()}, pid {run.pid(0)}), at 127.0.0.1:"
    )
    if number == signal.SIGKILL:
        assert text.endswith("the connection was closed; the process has ended")
    else:
        assert text.endswith("; the process is stopped")
        assert "no answer for 3 s" in text
    report = run.report()
    assert not report["ok"]
    assert report["failures"][text] == [1, 2]


def test_f38_a_rank_that_skips_one_collective(tmp_path):
    """Rank 2 goes on to the group of a sub-mesh, where rank 3 never comes."""
    run = Run(
        tmp_path,
        """
        pair = pr.Mesh(world, dp=2, tp=2)["tp"]
        reduce("first")
        if world.rank != 2:
            run(lambda: reduce("skipped by 2"))
        run(lambda: pair.all_reduce(np.ones(8)))
        """,
        num_ranks=4,
    )
    assert set(run.told) == {0, 1, 2, 3}, run.done.stderr
    report = run.report()
    assert not report["ok"]
    stuck = {entry["label"]: entry for entry in report["stuck"]}
    skipped = stuck["skipped by 2"]
    assert list(skipped["missing"]) == ["2"]
    assert "all_reduce float32[4] sum" in skipped["missing"]["2"]["last"]
    assert "label 'first'" in skipped["missing"]["2"]["last"]
    assert "all_reduce float64[8] sum" in skipped["missing"]["2"]["next"]
    other = stuck[""]
    assert list(other["missing"]) == ["3"]
    assert "skipped by 2" in other["missing"]["3"]["next"]
    done = polyreme("comm-report", run.record)
    assert (done.returncode, done.stderr) == (1, "")
    assert "rank 2 never arrived at all_reduce float32[4] sum" in done.stdout


def test_f33_a_frozen_watch_is_a_silent_rank(tmp_path):
    run = Run(
        tmp_path,
        """
        reduce("first")
        if world.rank == 1:
            world._core.freeze_watch()
            time.sleep(5)
        run(lambda: reduce("second"))
        """,
        survivor_grace=10,  # the frozen one sleeps on after the others have ended
    )
    text = run.verdict([0, 1, 2])
    assert f"rank 1 (host {socket.gethostname()}, pid {run.pid(1)}): no heartbeat for 3 s" in text
    assert text.endswith("; the process is alive")


def test_one_rank_alone_writes_a_journal(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYREME_RECORD_DIR", str(tmp_path / "from the environment"))
    world = alone()
    alone(record_dir=tmp_path / "from the argument").barrier()
    world.barrier()
    assert world.failure == ""
    del world
    for name in ("from the environment", "from the argument"):
        ((journal,), skipped) = read_directory(tmp_path / name)
        assert skipped == {}
        assert journal.describe(journal.operations[-1]) == "barrier"


def test_a_record_directory_of_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(pr.InvalidArgument, ["open", "another user"], lambda: alone(record_dir=tmp_path / "open"))


def test_intervals_that_make_no_sense_are_refused():
    refused(pr.InvalidArgument, ["peer_timeout_s=1", "4"], lambda: alone(heartbeat_s=2.0, peer_timeout_s=1.0))
    refused(pr.InvalidArgument, ["heartbeat_s=0"], lambda: alone(heartbeat_s=0))
