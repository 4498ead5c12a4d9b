"""What the launcher says about this process: a pure function of environment variables.

Understood are `polyreme run` and whoever sets the same variables as torchrun (RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and no launcher at all: one rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidArgument, NotAvailable

_LOOPBACK = "127.0.0.1"
# Launchers that set no RANK: each rank would quietly train alone.
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "PMI_SIZE": "mpirun (MPICH, Intel MPI)",
}


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Who this process is and where rank 0 listens.

    secret: admits a process to the job; from POLYREME_SECRET, or derived from torchrun's run id,
    which guards against mixing up jobs, not against an attacker.
    store_fd: on rank 0 of `polyreme run`, the inherited listening socket; otherwise None.
    port_is_held: `polyreme run` has held master_port since before the ranks started.
    num_threads: POLYREME_NUM_THREADS, or None if not set.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = _LOOPBACK
    master_port: int = 0
    secret: str = ""
    job_id: str = ""
    store_fd: int | None = None
    port_is_held: bool = False
    num_threads: int | None = None


def _integer(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not an integer; expected {low} to {high}") from None
    if not low <= value <= high:
        raise InvalidArgument(f"{name}={value} is out of range; expected {low} to {high}")
    return value


def _refuse_other_launchers(environ: Mapping[str, str]) -> None:
    for name, launcher in _OTHER_LAUNCHERS.items():
        text = environ.get(name, "1")
        if text.isdigit() and int(text) > 1:
            raise NotAvailable(
                f"{name}={text}: {launcher} started this process, which this version does not"
                " understand; start the script with `polyreme run -n N` or torchrun"
            )


def read_rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Reads `environ` (default: os.environ).

    Raises:
        InvalidArgument: variables are missing, malformed or contradict each other; the message
            names them with their values.
        NotAvailable: another launcher started several tasks.
    """
    env = os.environ if environ is None else environ
    threads = _integer(env, "POLYREME_NUM_THREADS", 1, 1024) if "POLYREME_NUM_THREADS" in env else None
    if "RANK" not in env and "WORLD_SIZE" not in env:
        _refuse_other_launchers(env)
        return RankEnvironment(num_threads=threads)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise InvalidArgument(
                f"{other}={env[other]!r} is set, but {name} is not; set both, or neither for one rank"
            )
    size = _integer(env, "WORLD_SIZE", 1, 1 << 20)
    rank = _integer(env, "RANK", 0, 1 << 20)
    if rank >= size:
        raise InvalidArgument(f"RANK={rank} with WORLD_SIZE={size}: expected 0 <= RANK < WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", 0, rank) if "LOCAL_RANK" in env else rank
    if size == 1:
        return RankEnvironment(num_threads=threads)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise InvalidArgument(
                f"WORLD_SIZE={size} needs {name}, which is not set; set the address where rank 0"
                " listens, or start the script with `polyreme run -n N`"
            )
    local_size = _integer(env, "LOCAL_WORLD_SIZE", 1, size) if "LOCAL_WORLD_SIZE" in env else size
    if local_size != size:
        raise NotAvailable(
            f"WORLD_SIZE={size}, but LOCAL_WORLD_SIZE={local_size}: this version runs on one host;"
            f" start at most the {local_size} ranks of one host"
        )
    port = _integer(env, "MASTER_PORT", 1, 65535)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id:
        # torchrun's own store listens on MASTER_PORT; ours takes the next one (the one before the last).
        port = port + 1 if port < 65535 else port - 1
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # ranks of an earlier attempt are not of this job
    job_id = env.get("POLYREME_JOB_ID", f"{run_id or 'job'}-{env['MASTER_PORT']}-{attempt}")
    return RankEnvironment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
        secret=env.get("POLYREME_SECRET", job_id),
        job_id="".join(c if c.isalnum() else "-" for c in job_id)[:64],
        store_fd=_integer(env, "POLYREME_STORE_FD", 0, 1 << 20) if "POLYREME_STORE_FD" in env else None,
        port_is_held=env.get("POLYREME_LAUNCHER") == "run",
        num_threads=threads,
    )
