"""The ranks of a job and their groups; named axes over them are in mesh.py."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from . import _core
from .checks import MAX_THREADS, MAX_TIMEOUT_S, check_int, check_number, check_timeout, check_type
from .environment import RankEnvironment, meet, read_rank_environment
from .errors import InvalidArgument, NotAvailable

__all__ = ["Lanes", "World", "init"]


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Where sums may be cut, and their order. Loss, norm and weights are equal for every layout with equal lanes.

    dp: lanes of the global batch; a power of two that dp divides, or dp itself (the default,
        None).
    tp: lanes of the dimensions that tensor parallelism cuts (heads, mlp_hidden, the vocabulary, and the tokens of a
        sample), all of which it must divide but the vocabulary; a power of two that tp divides, or tp itself (the
        default, None).
    order: of the sum over micro-batches and lanes. "lane_first": a lane's micro-batches one after the other,
        then the lanes; their size does not change the bits, but where a lane has several, ZeRO stages 2 and 3
        hold the whole local gradient until the last lane ends. "round_first": the lanes' first micro-batches,
        then their second ones, ...: every round is reduced to its shard at once, which takes the least memory
        and more traffic, and the size of micro-batches is part of the order.
    """

    dp: int | None = None
    tp: int | None = None
    order: Literal["lane_first", "round_first"] = "lane_first"

    def __post_init__(self) -> None:
        if self.order not in ("lane_first", "round_first"):
            raise InvalidArgument(f"Lanes: order={self.order!r}; expected 'lane_first' or 'round_first'")
        for axis in ("dp", "tp"):
            lanes = getattr(self, axis)
            if lanes is not None:
                lanes = check_int(f"Lanes: {axis}", lanes, 1, otherwise=f"None for the size of {axis}")
                object.__setattr__(self, axis, lanes)


class OneCaller:
    """Lets one thread of a rank at a time into what its ranks do together: `with calls("all_reduce"):`.

    Calls meet those of other ranks in the order in which they are made, which two threads leave to chance.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = ""

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(
                f"{what}: this rank is inside of {self._inside}, in another thread or around this call; what ranks do"
                " together has one order: call it from one thread, one after the other"
            )
        self._inside = what
        try:
            yield
        finally:
            self._lock.release()


class World:
    """All ranks of the job, with this rank's device. Made by `init`.

    local_rank, local_size: this rank among those that its host runs, as the launcher says.
    """

    def __init__(self, core: _core.World, local_rank: int = 0, local_size: int = 1) -> None:
        self._core = core
        self._calls = OneCaller()
        self.local_rank = local_rank
        self.local_size = local_size
        # At the end of the process in reverse order. Collectives in flight use memory of Python: they end
        # before the interpreter does.
        weakref.finalize(self, core.leave)
        weakref.finalize(self, core.stop_background, "the process is ending")
        weakref.finalize(self, _report_last_exception, core)

    @property
    def rank(self) -> int:
        """This process among the ranks of the job, from 0."""
        return self._core.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._core.size

    @property
    def hosts(self) -> list[str]:
        """Where each rank runs, by rank."""
        return self._core.hosts

    @property
    def device(self) -> str:
        """One line about the device: kind, threads, instruction-set level."""
        return self._core.device_description

    def barrier(self, timeout_s: float = 600.0) -> None:
        """Waits until every rank has called it.

        Raises:
            Timeout: after `timeout_s`, naming the missing ranks.
        """
        timeout_s = check_timeout("barrier: timeout_s", timeout_s)
        with self._calls("barrier"):
            self._core.barrier(timeout_s=timeout_s)

    @property
    def failure(self) -> str:
        """The first failure of the job that was reported or noticed, the same text on all ranks; or ""."""
        return self._core.failure

    def memory(self) -> dict[str, int]:
        """Bytes of device memory: in_use_bytes, peak_bytes, reserved_bytes."""
        return self._core.memory()

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={self.device!r})"


def init(
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    isa: str = "auto",
    executor: str = "immediate",
    transport: str | None = None,
    sums: str = "ordered",
    interface: str | None = None,
    timeout_s: float = 600.0,
    init_timeout_s: float = 300.0,
    heartbeat_s: float = 2.0,
    peer_timeout_s: float = 30.0,
    record_dir: str | os.PathLike[str] | None = None,
    environment: RankEnvironment | None = None,
) -> World:
    """Meets the other ranks of the job and returns the world. Collective.

    Args:
        device: "cpu"; "cuda": a GPU, of those that this process sees the one of its place among the ranks of its
            host, counted round; "cuda:1": that one. The same kind on all ranks. On GPUs fp32, bf16 and fp16 have the
            bits of the CPU at "avx2".
        num_threads: threads of this rank's operations; default POLYREME_NUM_THREADS, or the CPUs
            that Slurm gave each task, or the CPUs of this process divided by the ranks of this host.
            Does not change the bits. Of no effect on GPUs, as isa is.
        isa: "auto", "avx2", "avx512" or "amx"; all ranks use the lowest level among them.
        executor: "immediate", or "deferred" to test the ordering of operations (slow).
        transport: "auto": shared memory between the ranks of a host, TCP between hosts; "shm", "tcp" or
            "mpi" (Open MPI, in a job of mpirun): that alone. Between GPUs "auto" is NCCL, which wants one for each
            rank; the others go by way of the host's memory, slowly, and let ranks share a GPU. Default
            POLYREME_TRANSPORT, or "auto". Does not change the bits.
        sums: "ordered": the terms of a reduction are added in one tree, the same bits on every transport and layout.
            "fast": as the transport likes best; the bits may depend on it and on the number of ranks. Shared memory,
            TCP and MPI add in order either way, at no cost; NCCL's own collectives are what differs.
        interface: name or address of the network interface over which the other hosts reach this one;
            default POLYREME_INTERFACE, or the one that leads to rank 0.
        timeout_s: limit of one collective among live ranks.
        init_timeout_s: limit of this call.
        heartbeat_s: how often this rank tells the store of rank 0 that it lives.
        peer_timeout_s: how long a rank, or that store, may be silent before the job has failed; at least
            twice heartbeat_s. An exception that ends this process, or its death, fails the job at once.
        record_dir: where each rank keeps the journal of its last collectives, for `polyreme comm-report`;
            default POLYREME_RECORD_DIR, or nowhere. Made with mode 0700 if it is not there.
        environment: who this rank is; default: from the launcher's variables (polyreme.environment
            says whose).

    Raises:
        InvalidArgument: contradicting variables or arguments.
        NotAvailable: a device that this build or this machine does not have, and what to do about it.
        Timeout: ranks did not come; names them.
    """
    if num_threads is not None:
        num_threads = check_int("init: num_threads", num_threads, 1, MAX_THREADS)
    timeout_s = check_timeout("init: timeout_s", timeout_s)
    init_timeout_s = check_timeout("init: init_timeout_s", init_timeout_s)
    if transport is None:
        transport = os.environ.get("POLYREME_TRANSPORT", "auto")
    if interface is None:
        interface = os.environ.get("POLYREME_INTERFACE", "")
    texts = {
        "device": device,
        "isa": isa,
        "executor": executor,
        "transport": transport,
        "interface": interface,
    }
    for name, value in texts.items():
        check_type(f"init: {name}", value, str, "a text")
    if sums not in ("ordered", "fast"):
        raise InvalidArgument(f"init: sums={sums!r}; expected 'ordered' or 'fast'")
    heartbeat_s = check_number("init: heartbeat_s", heartbeat_s, 0.001, MAX_TIMEOUT_S)
    peer_timeout_s = check_number("init: peer_timeout_s", peer_timeout_s, 2 * heartbeat_s, MAX_TIMEOUT_S)
    if record_dir is None:
        record_dir = os.environ.get("POLYREME_RECORD_DIR", "")
    env = environment if environment is not None else read_rank_environment()
    gpu = _gpu_of(device, env.local_rank, executor)
    start = time.monotonic()
    with meet(env, init_timeout_s) as meeting:
        left_s = max(0.001, init_timeout_s - round(time.monotonic() - start, 1))
        core = _core.make_world(
            rank=env.rank,
            size=env.size,
            master_addr=meeting.host,
            master_port=meeting.port,
            store_fd=-1 if meeting.store_fd is None else meeting.store_fd,
            secret=meeting.secret,
            job_id=meeting.job_id,
            transport=transport,
            fast_sums=sums == "fast",
            interface=interface,
            init_timeout_s=left_s,
            timeout_s=timeout_s,
            # A port that is held accepts from the start; rank 0 answers once it is here.
            greeting_limit_s=left_s if meeting.is_held else 3.0,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
            record_dir=os.fspath(record_dir),
            num_threads=num_threads or _default_threads(env),
            isa=isa,
            executor=executor,
            schedule_seed=0,
            gpu=gpu,
            progress=logging.getLogger("polyreme").warning,
        )
    if env.size > 1:
        _report_unhandled_exceptions(core)
    return World(core, env.local_rank, env.local_size)


def _gpu_of(device: str, local_rank: int, executor: str) -> int:
    """Which of the GPUs that this process sees; -1 for the CPU."""
    if device == "cpu":
        return -1
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()) or device == "cuda:":
        raise InvalidArgument(f"init: device={device!r}; expected 'cpu', 'cuda' or 'cuda:INDEX'")
    if executor != "immediate":
        raise InvalidArgument(
            f"init: executor={executor!r} is of the CPU; leave it out with device={device!r}"
        )
    try:
        num_gpus = _core.num_gpus()
    except NotAvailable as reason:
        raise NotAvailable(f"init: device={device!r}: {reason}; `polyreme doctor` says more") from None
    if not index:
        return local_rank % num_gpus
    if int(index) >= num_gpus:
        raise NotAvailable(f"init: device={device!r}: this process sees {num_gpus} GPUs, from cuda:0 on")
    return int(index)


def _report_unhandled_exceptions(core: _core.World) -> None:
    """An exception that ends the process becomes the failure of the job, known to all ranks."""
    previous, reference = sys.excepthook, weakref.ref(core)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        world = reference()
        if world is not None:
            world.report_failure(f"{kind.__name__}: {error}")

    sys.excepthook = hook


def _report_last_exception(core: _core.World) -> None:
    """At the end of the process. A hook that was set after ours may have kept the exception from it.

    Where somebody types, an exception does not end the process.
    """
    error = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1") and not sys.flags.interactive:
        core.report_failure(f"{type(error).__name__}: {error}")


def _default_threads(env: RankEnvironment) -> int:
    usable = len(os.sched_getaffinity(0))
    if env.num_threads is not None:
        return env.num_threads
    if env.cpus_per_rank is not None:
        return min(env.cpus_per_rank, usable)
    return max(1, usable // env.local_size)
