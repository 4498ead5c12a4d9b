"""The environment of a rank: the launch variables, and its share of the CPUs.

Pure but for `usable_cpus`, which asks the system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import cgroup

MASTER_ADDR = "127.0.0.1"
STORE_FD = "POLYREME_STORE_FD"
MEMORY = "POLYREME_MEMORY"

# Each of them says that another launcher has already made this process a rank; of how many stands in the first of
# the others that is set.
_RANK_VARIABLES = {
    "RANK": ("WORLD_SIZE",),
    "WORLD_SIZE": ("WORLD_SIZE",),
    "LOCAL_RANK": ("WORLD_SIZE",),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "PMIX_RANK": ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
    "PMI_RANK": ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What all ranks of one launch share.

    secret: 32 random bytes in hex; admits a connection to the job. Never print it.
    restart: how often the ranks have been started before. memory: the folder that outlives them, or empty.
    """

    num_ranks: int
    port: int
    job_id: str
    secret: str
    num_threads: int
    restart: int = 0
    memory: str = ""

    def __repr__(self) -> str:  # so that no log or traceback shows the secret
        return f"JobSettings(num_ranks={self.num_ranks}, port={self.port}, job_id={self.job_id!r})"


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """CPUs of each rank, or no binding (None), and the threads that each rank may start."""

    bindings: tuple[tuple[int, ...], ...] | None
    num_threads: int


def foreign_launch(environ: Mapping[str, str]) -> list[str]:
    """`NAME=value` of every variable that shows another launcher at work; empty if none.

    A Slurm batch script alone is no rank, nor is the only task of a step (`srun -n 1`) or the only rank of a job.
    """
    found = []
    for name, sizes in _RANK_VARIABLES.items():
        size = next((environ[each] for each in sizes if each in environ), "")
        if name in environ and size != "1":
            found.append(f"{name}={environ[name]}")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        found.append(f"SLURM_STEP_NUM_TASKS={tasks}")
    return found


def rank_environment(
    base: Mapping[str, str], job: JobSettings, *, rank: int, store_fd: int | None = None
) -> dict[str, str]:
    """`base` with the launch variables of `rank`.

    A number of threads that the user has set stays. `store_fd`, for rank 0, is the listening
    socket of the store, inherited so that nobody can take the port between choice and use.
    """
    environment = dict(base)
    environment.pop(STORE_FD, None)
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.num_ranks),
        MASTER_ADDR=MASTER_ADDR,
        MASTER_PORT=str(job.port),
        POLYREME_JOB_ID=job.job_id,
        POLYREME_SECRET=job.secret,
        POLYREME_LAUNCHER="run",
        POLYREME_RESTART_COUNT=str(job.restart),
    )
    environment.pop(MEMORY, None)
    if job.memory:
        environment[MEMORY] = job.memory
    if store_fd is not None:
        environment[STORE_FD] = str(store_fd)
    environment.setdefault("POLYREME_NUM_THREADS", str(job.num_threads))
    environment.setdefault("OMP_NUM_THREADS", str(job.num_threads))
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash leaves its Python stack on stderr
    return environment


def plan_cpus(
    cpus: Sequence[int], num_ranks: int, *, quota: float | None = None, bind: str = "auto"
) -> CpuPlan:
    """Cuts `cpus`, in their order, into one equal contiguous share per rank.

    The shares are equal because the slowest rank sets the pace; a remainder stays unused. With
    fewer CPUs than ranks nothing is bound and each rank gets one thread. Under a CPU quota
    smaller than the set of CPUs the threads follow the quota and nothing is bound: which CPUs
    are free is then the kernel's to say.
    """
    usable = len(cpus) if quota is None else min(len(cpus), int(quota))
    share = usable // num_ranks
    if share < 1:
        return CpuPlan(bindings=None, num_threads=1)
    if bind != "auto" or usable < len(cpus) or num_ranks == 1:
        return CpuPlan(bindings=None, num_threads=share)
    bindings = tuple(tuple(cpus[r * share : (r + 1) * share]) for r in range(num_ranks))
    return CpuPlan(bindings=bindings, num_threads=share)


def usable_cpus() -> tuple[list[int], float | None]:
    """CPUs this process may run on, neighbours first, and the quota of its control group.

    Many machines number the second hardware threads after all the first ones. In plain order
    two ranks would then share every core, so the order is by package, core and thread.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with open(f"{folder}/physical_package_id", encoding="ascii") as file:
                package = int(file.read())
            with open(f"{folder}/core_id", encoding="ascii") as file:
                return (package, int(file.read()), cpu)
        except (OSError, ValueError):
            return (0, cpu, cpu)

    return sorted(os.sched_getaffinity(0), key=place), cgroup.cpu_quota()
