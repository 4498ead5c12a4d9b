"""What the launcher says about this process: a pure function of environment variables."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidArgument
from .node_list import expand_counts, expand_node_list

_LOOPBACK = "127.0.0.1"
_MAX_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Who this process is and how it finds rank 0.

    launcher: "polyreme run", "torchrun", "RANK and WORLD_SIZE", "Open MPI", "PMI", "Slurm" or "none".
    local_rank, local_size: among the ranks of this host.
    master_port: where rank 0 listens on master_addr. 0: it binds a free one and tells the others,
        who are on its host, through a private file.
    origin: for errors: how master_addr and master_port were chosen, where nobody has named them.
    agent_port: where torchrun's agent serves a store of its own, through which rank 0 can tell its
        port; 0 if there is none.
    secret: admits a process to the job; from POLYREME_SECRET, empty if not set. See `meet`.
    secret_file: POLYREME_SECRET_FILE, empty if not set.
    job_id: equal on all ranks of a job. Empty if the launcher gives it no name: then the process
        that started the ranks is its name.
    rank_variables: that process is the nearest above this one in which they are different.
    store_fd: on rank 0 of `polyreme run`, the inherited listening socket; otherwise None.
    port_is_held: somebody has listened on master_port since before the ranks started.
    num_threads: POLYREME_NUM_THREADS, or None if not set.
    cpus_per_rank: what the launcher has set aside for each rank, or None if it did not say.
    """

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = _LOOPBACK
    master_port: int = 0
    origin: str = ""
    agent_port: int = 0
    secret: str = dataclasses.field(default="", repr=False)  # no log or traceback shows it
    secret_file: str = ""
    job_id: str = ""
    rank_variables: tuple[str, ...] = ()
    store_fd: int | None = None
    port_is_held: bool = False
    num_threads: int | None = None
    cpus_per_rank: int | None = None


def read_rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Reads `environ` (default: os.environ); the package's docstring says in which order.

    Raises:
        InvalidArgument: variables are missing, malformed or contradict each other; the message
            names them with their values.
    """
    env = os.environ if environ is None else environ
    threads = _integer(env, "POLYREME_NUM_THREADS", 1, 1024) if "POLYREME_NUM_THREADS" in env else None
    if env.get("POLYREME_SECRET") == "":
        raise InvalidArgument("POLYREME_SECRET='' would admit anybody; set a secret, or unset it")
    found = _launched(env)
    if found.size == 1:
        return RankEnvironment(num_threads=threads, cpus_per_rank=found.cpus_per_rank)
    return dataclasses.replace(
        found,
        num_threads=threads,
        secret=env.get("POLYREME_SECRET", ""),
        secret_file=env.get("POLYREME_SECRET_FILE", ""),
        job_id=_plain(env.get("POLYREME_JOB_ID", found.job_id)),
    )


def _launched(env: Mapping[str, str]) -> RankEnvironment:
    if "RANK" in env or "WORLD_SIZE" in env:
        return _explicit(env)
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return _open_mpi(env)
    if not _repeats_srun(env) and any(name in env for name in ("PMI_RANK", "PMI_SIZE", "PALS_RANKID")):
        return _pmi(env)
    if "SLURM_STEP_NUM_TASKS" in env:
        return _slurm(env)
    if "PMIX_RANK" in env:
        raise InvalidArgument(
            f"PMIX_RANK={env['PMIX_RANK']!r}: a launcher has made this process a rank, but no variable says"
            " of how many; set RANK and WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    _check_batch_script(env)
    return RankEnvironment()


# ---- launchers ----


def _explicit(env: Mapping[str, str]) -> RankEnvironment:
    """`polyreme run`, torchrun, and whoever sets the same variables as they do."""
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    local_rank, local_size = _local(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", rank, size)
    if size == 1:
        return RankEnvironment()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise InvalidArgument(
                f"WORLD_SIZE={size} needs {name}, which is not set; set the address where rank 0"
                " listens, or start the script with `polyreme run -n N`"
            )
    port = _integer(env, "MASTER_PORT", 1, 65535)
    found = RankEnvironment(
        launcher="RANK and WORLD_SIZE",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
        job_id=f"job-{port}",
    )
    if env.get("POLYREME_LAUNCHER") == "run":
        fd = _integer(env, "POLYREME_STORE_FD", 0, 1 << 20) if "POLYREME_STORE_FD" in env else None
        return dataclasses.replace(found, launcher="polyreme run", store_fd=fd, port_is_held=True)
    if run_id := env.get("TORCHELASTIC_RUN_ID", ""):
        # Ranks of an earlier attempt are not of this job. Agents of several nodes count the restarts that they began.
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0") if local_size == size else "nodes"
        owns_port = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # MASTER_PORT is taken by the agent's store, or torch.distributed will want it.
        own_port = port + 1 if port < 65535 else port - 1
        return dataclasses.replace(
            found,
            launcher="torchrun",
            master_port=own_port,
            origin=f"port {own_port} is next to torchrun's MASTER_PORT={port}",
            agent_port=port if owns_port else 0,
            job_id=f"{run_id}-{port}-{attempt}",
        )
    return found


def _open_mpi(env: Mapping[str, str]) -> RankEnvironment:
    rank, size = _rank_and_size(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = _local(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", rank, size)
    # The name of version 4 is a hash of 16 bits; the second variable has 128 random ones.
    names = [
        env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", "")),
        env.get("OMPI_MCA_orte_precondition_transports", ""),
    ]
    job_id = "-".join(["ompi", *filter(None, names)]) if any(names) else ""
    found = RankEnvironment(
        launcher="Open MPI",
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        job_id=job_id,
        rank_variables=("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    )
    return _placed(env, found, "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500")


def _pmi(env: Mapping[str, str]) -> RankEnvironment:
    rank_name = "PMI_RANK" if "PMI_RANK" in env or "PALS_RANKID" not in env else "PALS_RANKID"
    rank, size = _rank_and_size(env, rank_name, "PMI_SIZE")
    local_names = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # Hydra
    for names in (("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")):
        if local_names[0] not in env and names[0] in env:
            local_names = names
    local = _local(env, *local_names, rank, size)
    name = env.get("PALS_APID") or env.get("PMI_JOBID")
    found = RankEnvironment(
        launcher="PMI",
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        job_id=f"pmi-{name}" if name else "",
        rank_variables=(rank_name, "PMI_SIZE", "PMI_FD"),
    )
    return _placed(env, found, "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500")


def _slurm(env: Mapping[str, str]) -> RankEnvironment:
    rank, size = _rank_and_size(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    cpus = _integer(env, "SLURM_CPUS_PER_TASK", 1, 1 << 16) if "SLURM_CPUS_PER_TASK" in env else None
    if size == 1:
        return RankEnvironment(cpus_per_rank=cpus)
    for name in (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_TASKS_PER_NODE",
    ):
        if name not in env:
            raise InvalidArgument(f"SLURM_STEP_NUM_TASKS={size} needs {name}, which is not set")
    tasks = expand_counts("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_TASKS_PER_NODE"])
    if sum(tasks) != size:
        raise InvalidArgument(
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']!r} has {sum(tasks)} tasks,"
            f" SLURM_STEP_NUM_TASKS={size}"
        )
    local_size = tasks[_integer(env, "SLURM_NODEID", 0, len(tasks) - 1)]
    step = f"{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}-{env.get('SLURM_RESTART_COUNT', '0')}"
    found = RankEnvironment(
        launcher="Slurm",
        rank=rank,
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID", 0, local_size - 1),
        local_size=local_size,
        job_id=f"slurm-{step}",
        cpus_per_rank=cpus,
    )
    if local_size < size and "MASTER_ADDR" not in env:
        host, origin = _first_host(env, rank, len(tasks))
        found = dataclasses.replace(found, master_addr=host, origin=origin)
    # Below the ports that the kernel gives to clients, and the same on every rank.
    return _placed(env, found, derived_port=10000 + zlib.crc32(step.encode()) % 20000)


def _repeats_srun(env: Mapping[str, str]) -> bool:
    """The variables of PMI are srun's own (--mpi=pmi2), not of an mpiexec whose daemons it started."""
    return (
        "SLURM_STEP_NUM_TASKS" in env
        and env.get("PMI_RANK", env.get("PALS_RANKID")) == env.get("SLURM_PROCID")
        and env.get("PMI_SIZE", env["SLURM_STEP_NUM_TASKS"]) == env["SLURM_STEP_NUM_TASKS"]
    )


def _first_host(env: Mapping[str, str], rank: int, num_nodes: int) -> tuple[str, str]:
    """The host of task 0, and how it was found."""
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"
    hosts = expand_node_list(name, env.get(name, ""))
    remedy = "set MASTER_ADDR to the host of task 0"
    if len(hosts) < num_nodes:
        raise InvalidArgument(
            f"{name}={env.get(name)!r} has {len(hosts)} host(s),"
            f" SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']!r} has {num_nodes}; {remedy}"
        )
    own = env.get("SLURMD_NODENAME", hosts[0])
    if rank == 0 and own != hosts[0]:
        raise InvalidArgument(
            f"task 0 is on SLURMD_NODENAME={own!r}, not the first of {name}={env[name]!r}; {remedy}"
        )
    return hosts[0], f"MASTER_ADDR is not set; {hosts[0]} is the first of {name}={env[name]!r}"


def _check_batch_script(env: Mapping[str, str]) -> None:
    """Outside a step Slurm started one process. Refuses what asks for several and for one."""
    if "SLURM_NTASKS" not in env or "SLURM_NTASKS_PER_NODE" not in env:
        return
    tasks = _integer(env, "SLURM_NTASKS", 1, _MAX_RANKS)
    per_node = _integer(env, "SLURM_NTASKS_PER_NODE", 1, _MAX_RANKS)
    if tasks < per_node:
        raise InvalidArgument(
            f"SLURM_NTASKS={tasks} with SLURM_NTASKS_PER_NODE={per_node}: fewer tasks in all than on each"
            " node; correct --ntasks or --ntasks-per-node, and start the script with srun"
        )


# ---- what they share ----


def _placed(
    env: Mapping[str, str], found: RankEnvironment, remedy: str = "", derived_port: int = 0
) -> RankEnvironment:
    """`found` with the place of rank 0. MASTER_ADDR and MASTER_PORT, where set, always count.

    On one host the port stays 0: rank 0 tells it. On several hosts it is derived_port, or must be
    set; remedy says how.
    """
    port = _integer(env, "MASTER_PORT", 1, 65535) if "MASTER_PORT" in env else 0
    if found.local_size < found.size and derived_port and not port:
        port = derived_port
        text = f"MASTER_PORT is not set; {port} is derived from {found.job_id}"
        found = dataclasses.replace(found, origin="; ".join(filter(None, [found.origin, text])))
    if found.local_size < found.size and remedy:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise InvalidArgument(
                f"{found.launcher} has started {found.local_size} of {found.size} ranks on this host; ranks of"
                f" several hosts need {' and '.join(missing)}, which is not set: {remedy}, where HOST is the"
                " host of rank 0"
            )
    return dataclasses.replace(
        found,
        master_addr=env.get("MASTER_ADDR", found.master_addr),
        master_port=port,
        # The process that started the ranks is another one on every host.
        job_id=found.job_id or (f"job-{port}" if port else ""),
    )


def _integer(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = env[name]
    try:
        value = int(text)
    except ValueError:
        raise InvalidArgument(f"{name}={text!r} is not an integer; expected {low} to {high}") from None
    if not low <= value <= high:
        raise InvalidArgument(f"{name}={value} is out of range; expected {low} to {high}")
    return value


def _rank_and_size(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in env:
            raise InvalidArgument(
                f"{other}={env[other]!r} is set, but {name} is not; set both, or neither for one rank"
            )
    size = _integer(env, size_name, 1, _MAX_RANKS)
    rank = _integer(env, rank_name, 0, _MAX_RANKS)
    if rank >= size:
        raise InvalidArgument(
            f"{rank_name}={rank} with {size_name}={size}: expected 0 <= {rank_name} < {size_name}"
        )
    return rank, size


def _local(env: Mapping[str, str], rank_name: str, size_name: str, rank: int, size: int) -> tuple[int, int]:
    """(local rank, local size); where the launcher does not say, all ranks are on one host."""
    local_size = _integer(env, size_name, 1, size) if size_name in env else size
    if rank_name in env:
        local_rank = _integer(env, rank_name, 0, size - 1)
    elif local_size == size:
        local_rank = rank
    else:
        raise InvalidArgument(
            f"{size_name}={local_size} is set, but {rank_name} is not; set both, or neither"
        )
    if local_rank >= local_size:
        raise InvalidArgument(
            f"{rank_name}={local_rank} with {size_name}={local_size}: expected {rank_name} < {size_name}"
        )
    return local_rank, local_size


def _plain(job_id: str) -> str:
    """`job_id` as a name for files and segments: at most 64 letters, digits and dashes."""
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in job_id)
    if len(text) > 64:
        text = f"{text[:47]}-{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"
    return text
