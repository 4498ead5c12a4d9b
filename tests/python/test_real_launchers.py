"""Jobs under the real launchers: torchrun, Open MPI, MPICH and Slurm, each against one rank alone.

A launcher that is not installed is a reported skip, under POLYREME_REQUIRE_LAUNCHERS=1 a failure.
Time limits only guard against hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polyreme as pr
import pytest
import slurm_cluster
from helpers import HANG_S, TINY, alone, batches, clean_environment, processes_with, train
from polyreme import _core
from slurm_cluster import Cluster, free_ports

# Not in the tests of wheels: the package is the same there.
pytestmark = [pytest.mark.mp, pytest.mark.slow]

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
OPEN_MPI = "mpirun.openmpi"
HYDRA = "mpiexec.hydra"
# Open MPI counts cores and does not like to be root.
OPEN_MPI_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
STEPS, SAMPLES, LANES = 2, 8, 4

# Every rank trains a tiny model and says what it saw in a file of its own.
HEAD = """
import importlib.util, json, os, signal, sys
import numpy as np
import polyreme as pr
from helpers import TINY, batches, train
from polyreme.environment import read_rank_environment

def tell(world, **more):
    said = dict(size=world.size, local_rank=world.local_rank, local_size=world.local_size, **more)
    said["launcher"] = read_rank_environment().launcher
    said["has_torch"] = "torch" in sys.modules
    with open(f"{os.environ['SAID']}/{world.rank}.json", "w") as file:
        json.dump(said, file)
"""
TRAIN = f"""
world = pr.init(init_timeout_s=40, timeout_s=40)
data = batches({STEPS}, {SAMPLES}, pr.models.GPT(**TINY))
history, weights = train(world, data, lanes=pr.Lanes(dp={LANES}))
tell(world, history=history, weights=weights)
"""
SUM = """
world = pr.init(init_timeout_s=40, timeout_s=40)
value = float(os.environ["VALUE"])
tell(world, sum=pr.Mesh(world)["dp"].all_reduce(np.array([value * (world.rank + 1)])).tolist())
"""
DIE = """
world = pr.init(init_timeout_s=40, timeout_s=40)
everyone = pr.Mesh(world)["dp"]
everyone.all_reduce(np.ones(3))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
everyone.all_reduce(np.ones(3))
"""


def need(*programs):
    missing = [name for name in programs if shutil.which(name, path=slurm_cluster.PATH) is None]
    if missing:
        text = f"not installed: {', '.join(missing)}"
        if os.environ.get("POLYREME_REQUIRE_LAUNCHERS") == "1":
            pytest.fail(text)
        pytest.skip(text)


class Job:
    """A script in a folder of its own, and what its ranks said. Nothing may be left of it."""

    def __init__(self, folder, script):
        self.script = folder / "script.py"
        self.script.write_text(HEAD + script)
        self.said = folder / "said"
        self.said.mkdir()
        # Where rank 0 tells its port; it must be as private as the real one.
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.variables = {
            "SAID": str(self.said),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "POLYREME_NUM_THREADS": "1",
        }

    def start(self, *command, **more):
        environment = clean_environment(
            **OPEN_MPI_VARIABLES, **self.variables, POLYREME_TEST_JOB=str(self.said)
        )
        return subprocess.Popen(
            [*map(str, command)],
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command, **more):
        return self.end(self.start(*command, **more))

    def end(self, process):
        """(exit code, output) of a launcher that ends by itself."""
        try:
            output = process.communicate(timeout=HANG_S)[0]
        finally:
            process.kill()
        return process.returncode, output

    def ranks(self):
        return [json.loads(path.read_text()) for path in sorted(self.said.iterdir())]

    def check_nothing_left(self):
        assert not processes_with("POLYREME_TEST_JOB", self.said)
        assert not list(self.runtime.iterdir())

    def check_trained(self, expected, launcher, num_ranks, local_sizes=None):
        """The ranks trained what one rank alone trains, and knew who they were."""
        local_sizes = local_sizes or [num_ranks]
        local = [(rank, size) for size in local_sizes for rank in range(size)]
        history, weights = expected
        said = self.ranks()
        assert [rank["launcher"] for rank in said] == [launcher] * num_ranks
        assert [rank["size"] for rank in said] == [num_ranks] * num_ranks
        assert [(rank["local_rank"], rank["local_size"]) for rank in said] == local
        assert [rank["history"] for rank in said] == [[list(step) for step in history]] * num_ranks
        assert {rank["weights"] for rank in said} == {weights}
        self.check_nothing_left()


@pytest.fixture(scope="module")
def expected():
    """History and weights of one rank alone."""
    data = batches(STEPS, SAMPLES, pr.models.GPT(**TINY))
    return train(alone(), data, lanes=pr.Lanes(dp=LANES))


@pytest.fixture
def training(tmp_path):
    return Job(tmp_path, TRAIN)


# ---- torchrun ----

WITHOUT_TORCH = """
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else found(name, *more)
"""


@pytest.fixture
def torchrun():
    import reference  # noqa: F401  (skips where PyTorch is missing)

    return [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.torch
def test_torchrun_as_on_two_hosts(training, expected, torchrun):
    """The launch file once per host, each with one rank; they ask the store of torchrun's agent."""
    folder = training.script.parent / "bin"
    folder.mkdir()
    (folder / "torchrun").write_text('#!/bin/sh\nexec "$PYTHON" -m torch.distributed.run "$@"\n')
    (folder / "torchrun").chmod(0o755)
    where = {"NUM_HOSTS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    where["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    agents = [training.start(LAUNCH / "torchrun.sh", 1, training.script, **where) for _ in range(2)]
    ends = [training.end(agent) for agent in agents]
    assert [code for code, _ in ends] == [0, 0], ends
    training.check_trained(expected, "torchrun", 2, local_sizes=[1, 1])
    assert [rank["has_torch"] for rank in training.ranks()] == [True, True]


@pytest.mark.torch
def test_torchrun_without_its_client(tmp_path, expected, torchrun):
    """Where PyTorch cannot be asked, rank 0 takes the port next to that of the agent's store."""
    job = Job(tmp_path, WITHOUT_TORCH + TRAIN)
    code, output = job.run(*torchrun, "--standalone", "--nproc-per-node", 2, job.script)
    assert code == 0, output
    job.check_trained(expected, "torchrun", 2)
    assert [rank["has_torch"] for rank in job.ranks()] == [False, False]


# ---- mpirun ----


@pytest.mark.parametrize("mpirun, num_ranks, launcher", [(OPEN_MPI, 4, "Open MPI"), (HYDRA, 2, "PMI")])
def test_mpirun(training, expected, mpirun, num_ranks, launcher):
    need(mpirun)
    code, output = training.run(LAUNCH / "mpirun.sh", num_ranks, training.script, MPIRUN=mpirun)
    assert code == 0, output
    training.check_trained(expected, launcher, num_ranks)


def test_mpi_moves_the_data_too(tmp_path, expected):
    need(OPEN_MPI)
    training = Job(tmp_path, TRAIN + 'assert "libpolyreme_mpi.so" in open("/proc/self/maps").read()\n')
    if not (Path(_core.__file__).parent / "libpolyreme_mpi.so").exists():
        assert not os.environ.get("POLYREME_REQUIRE_LAUNCHERS"), "built without MPI"
        pytest.skip("built without MPI")
    where = {"MPIRUN": OPEN_MPI, "POLYREME_TRANSPORT": "mpi"}
    code, output = training.run(LAUNCH / "mpirun.sh", 4, training.script, **where)
    assert code == 0, output
    training.check_trained(expected, "Open MPI", 4)


@pytest.mark.parametrize("mpirun", [OPEN_MPI, HYDRA])
def test_a_shell_between_mpirun_and_the_rank(tmp_path, mpirun):
    need(mpirun)
    job = Job(tmp_path, SUM)
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n"$PYTHON" "$1"\nexit $?\n')
    wrapper.chmod(0o755)
    code, output = job.run(mpirun, "-n", 2, wrapper, job.script, VALUE="1")
    assert code == 0, output
    assert [rank["sum"] for rank in job.ranks()] == [[3.0], [3.0]]
    job.check_nothing_left()


@pytest.mark.parametrize("mpirun", [OPEN_MPI, HYDRA])
def test_o_fl_09_two_jobs_at_once(tmp_path, mpirun):
    """With default settings: both use one folder, each gets its own sum."""
    need(mpirun)
    runtime = tmp_path / "runtime"
    for i in range(3):
        jobs = []
        for value in (1, 100):
            folder = tmp_path / f"{i}-{value}"
            folder.mkdir()
            jobs.append(Job(folder, SUM))
            jobs[-1].variables.update(XDG_RUNTIME_DIR=str(runtime), VALUE=str(value))
            # Two mpiruns of Open MPI that start and end at one moment trip over the folder that they share.
            jobs[-1].variables.update(OMPI_MCA_orte_tmpdir_base=str(folder))
        runtime.mkdir(mode=0o700, exist_ok=True)
        running = [job.start(mpirun, "-n", 2, sys.executable, job.script) for job in jobs]
        ends = [job.end(process) for job, process in zip(jobs, running, strict=True)]
        assert [code for code, _ in ends] == [0, 0], ends
        assert [[rank["sum"] for rank in job.ranks()] for job in jobs] == [[[3.0]] * 2, [[300.0]] * 2]
    assert not list(runtime.iterdir())


@pytest.mark.parametrize("mpirun", [OPEN_MPI, HYDRA])
def test_a_killed_rank_under_mpirun(tmp_path, mpirun):
    """mpirun itself ends the others, so what they would say is not promised."""
    need(mpirun)
    job = Job(tmp_path, DIE)
    code, output = job.run(mpirun, "-n", 3, sys.executable, job.script)
    assert code != 0, output
    job.check_nothing_left()


# ---- Slurm ----


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    need(*slurm_cluster.PROGRAMS)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_srun(slurm, training, expected, mpi):
    if not slurm.has_mpi(mpi):
        pytest.skip(f"this Slurm has no --mpi={mpi}")
    num_ranks = 4 if mpi == "none" else 2
    done = slurm.srun(
        "-N1", f"-n{num_ranks}", f"--mpi={mpi}", sys.executable, training.script, **training.variables
    )
    assert done.returncode == 0, done.stderr
    training.check_trained(expected, "Slurm", num_ranks)


def test_srun_on_two_nodes(slurm, training, expected):
    """Their names are known to Slurm only, so the address is given; the port comes from the job."""
    variables = {**training.variables, "MASTER_ADDR": "127.0.0.1"}
    done = slurm.srun("-N2", "-n4", "--ntasks-per-node=2", sys.executable, training.script, **variables)
    assert done.returncode == 0, done.stderr
    training.check_trained(expected, "Slurm", 4, local_sizes=[2, 2])


def test_srun_takes_the_first_of_the_nodes(slurm, tmp_path):
    job = Job(tmp_path, SUM)
    done = slurm.srun("-N2", "-n2", sys.executable, job.script, VALUE="1", **job.variables)
    assert done.returncode != 0
    assert "CommError" in done.stderr
    assert "'n1'" in done.stderr
    assert "MASTER_ADDR is not set; n1 is the first of SLURM_STEP_NODELIST='n[1-2]'" in done.stderr
    assert "MASTER_PORT is not set" in done.stderr


def test_the_batch_script_of_slurm(slurm, training, expected):
    """The launch file. sbatch's own process is one rank, whatever the job was given."""
    batch = ("-N1", "--ntasks-per-node=2", "--cpus-per-task=1")
    done, output = slurm.sbatch(*batch, LAUNCH / "slurm.sbatch", training.script, **training.variables)
    assert done, output
    training.check_trained(expected, "Slurm", 2)
    command = f"{sys.executable} -c 'import polyreme as pr; print(pr.init().size, \"rank\")'"
    done, output = slurm.sbatch(*batch, "--wrap", command)
    assert done, output
    assert "1 rank" in output


def test_the_scaling_benchmark_of_slurm(slurm, tmp_path):
    """The launch file: table in the output, turns and summary as JSON lines, a picture."""
    tiny = ("--layers=1", "--hidden=16", "--heads=2", "--vocab=31", "--seq-len=8", "--repeats=2")
    batch = ("-N1", "--ntasks-per-node=2", "--cpus-per-task=1", f"--chdir={tmp_path}")
    done, output = slurm.sbatch(*batch, LAUNCH / "scaling.sbatch", *tiny, PYTHON=sys.executable)
    assert done, output
    assert "Slurm: 2 ranks" in output
    (lines,) = tmp_path.glob("scaling-*.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["size"] for row in rows if row["record"] == "summary"] == [1, 2]
    (picture,) = tmp_path.glob("scaling-*.svg")
    assert "</svg>" in picture.read_text()


def test_mpirun_inside_an_allocation_of_slurm(slurm, training, expected):
    need(OPEN_MPI)
    command = f"{OPEN_MPI} -n 2 {sys.executable} {training.script}"
    variables = {**training.variables, **OPEN_MPI_VARIABLES}
    done, output = slurm.sbatch("-N1", "--ntasks-per-node=2", "--wrap", command, **variables)
    assert done, output
    training.check_trained(expected, "Open MPI", 2)


def test_a_killed_rank_under_srun(slurm, tmp_path):
    job = Job(tmp_path, DIE)
    done = slurm.srun("-N1", "-n3", sys.executable, job.script, **job.variables)
    assert done.returncode != 0
    assert "lost rank 1 (host" in done.stderr
    job.check_nothing_left()


@pytest.mark.parametrize("mpi", ["none", "pmix"])
def test_polyreme_run_inside_a_step_of_one_task(slurm, tmp_path, mpi):
    """Its variables, and those of PMIx, are of the launcher and not of the ranks that it starts."""
    if not slurm.has_mpi(mpi):
        pytest.skip(f"this Slurm has no --mpi={mpi}")
    job = Job(tmp_path, SUM)
    command = (sys.executable, "-m", "polyreme", "run", "-n", 2, job.script)
    done = slurm.srun("-N1", "-n1", f"--mpi={mpi}", *command, VALUE="1", **job.variables)
    assert done.returncode == 0, done.stderr
    job.check_nothing_left()
