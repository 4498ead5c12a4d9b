"""Who a process is, from the variables of its launcher: a pure function that opens nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import polyreme as pr
import pytest
from helpers import HANG_S, clean_environment, refused
from polyreme import _core
from polyreme.environment import RankEnvironment, read_rank_environment

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **TWO,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "TORCHELASTIC_RUN_ID": "run/7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


# name -> (variables, error, what its text must have)
REFUSED = {
    "rank_without_world_size": ({"RANK": "0"}, pr.InvalidArgument, ["RANK='0'", "WORLD_SIZE"]),
    "world_size_without_rank": ({"WORLD_SIZE": "2"}, pr.InvalidArgument, ["WORLD_SIZE='2'", "RANK"]),
    "no_master_addr": (without(TWO, "MASTER_ADDR"), pr.InvalidArgument, ["WORLD_SIZE=2", "MASTER_ADDR"]),
    "no_master_port": (without(TWO, "MASTER_PORT"), pr.InvalidArgument, ["WORLD_SIZE=2", "MASTER_PORT"]),
    "rank_equals_world_size": ({**TWO, "RANK": "2"}, pr.InvalidArgument, ["RANK=2", "WORLD_SIZE=2"]),
    "rank_is_no_number": ({**TWO, "RANK": "x"}, pr.InvalidArgument, ["RANK='x'", "integer"]),
    "rank_is_empty": ({**TWO, "RANK": ""}, pr.InvalidArgument, ["RANK=''", "integer"]),
    "rank_is_negative": ({**TWO, "RANK": "-1"}, pr.InvalidArgument, ["RANK=-1", "0"]),
    "world_size_is_no_number": ({**TWO, "WORLD_SIZE": "2.0"}, pr.InvalidArgument, ["WORLD_SIZE='2.0'"]),
    "world_size_is_zero": ({"RANK": "0", "WORLD_SIZE": "0"}, pr.InvalidArgument, ["WORLD_SIZE=0", "1"]),
    "port_is_no_number": ({**TWO, "MASTER_PORT": "http"}, pr.InvalidArgument, ["MASTER_PORT='http'"]),
    "port_out_of_range": ({**TWO, "MASTER_PORT": "65536"}, pr.InvalidArgument, ["MASTER_PORT=65536", "65535"]),
    "local_rank_above_rank": ({**TWO, "LOCAL_RANK": "2"}, pr.InvalidArgument, ["LOCAL_RANK=2"]),
    "local_rank_is_no_number": ({**TWO, "LOCAL_RANK": "y"}, pr.InvalidArgument, ["LOCAL_RANK='y'"]),
    "local_size_above_size": ({**TWO, "LOCAL_WORLD_SIZE": "3"}, pr.InvalidArgument, ["LOCAL_WORLD_SIZE=3"]),
    "several_hosts": (
        {**TWO, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        pr.NotAvailable,
        ["WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "one host"],
    ),
    "threads_are_no_number": ({"POLYREME_NUM_THREADS": "many"}, pr.InvalidArgument, ["POLYREME_NUM_THREADS='many'"]),
    "no_threads": ({"POLYREME_NUM_THREADS": "0"}, pr.InvalidArgument, ["POLYREME_NUM_THREADS=0", "1"]),
    "store_fd_is_no_number": ({**TWO, "POLYREME_STORE_FD": "a"}, pr.InvalidArgument, ["POLYREME_STORE_FD='a'"]),
    "srun": ({"SLURM_STEP_NUM_TASKS": "2"}, pr.NotAvailable, ["SLURM_STEP_NUM_TASKS=2", "srun", "polyreme run"]),
    "open_mpi": ({"OMPI_COMM_WORLD_SIZE": "4"}, pr.NotAvailable, ["OMPI_COMM_WORLD_SIZE=4", "polyreme run"]),
    "mpich": ({"PMI_SIZE": "3"}, pr.NotAvailable, ["PMI_SIZE=3", "mpirun", "torchrun"]),
}  # fmt: skip


@pytest.fixture
def nothing_is_opened(monkeypatch):
    """Makes the test fail if a socket is opened or the core is asked for a world."""

    def never(*_, **__):
        pytest.fail("something was opened")

    monkeypatch.setattr(socket, "socket", never)
    monkeypatch.setattr(_core, "make_world", never)


@pytest.mark.parametrize("name", REFUSED)
def test_o_fl_08_contradicting_variables_are_refused_at_once(name, monkeypatch, nothing_is_opened):
    environ, error, words = REFUSED[name]
    refused(error, words, lambda: read_rank_environment(environ))
    for variable in {**TORCHRUN, "POLYREME_NUM_THREADS": "", "SLURM_STEP_NUM_TASKS": ""}:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    start = time.monotonic()
    refused(error, words, pr.init)
    assert time.monotonic() - start < 1


def test_f05_a_process_ends_with_the_variable_and_its_value():
    done = subprocess.run(
        [sys.executable, "-c", "import polyreme as pr; pr.init()"],
        env=clean_environment(**{**TWO, "RANK": "x"}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 1
    assert "InvalidArgument: RANK='x' is not an integer" in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
        {"LOCAL_RANK": "1"},
        # A batch script of a Slurm job is one process, whatever the job was given.
        {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"},
        {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=lambda environ: ",".join(environ) or "empty",
)
def test_one_rank(environ):
    assert read_rank_environment(environ) == RankEnvironment()


def test_polyreme_run():
    variables = {
        **TWO,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "POLYREME_JOB_ID": "0a1b",
        "POLYREME_SECRET": "s3cret",
        "POLYREME_LAUNCHER": "run",
        "POLYREME_STORE_FD": "5",
        "POLYREME_NUM_THREADS": "3",
    }
    assert read_rank_environment(variables) == RankEnvironment(
        rank=0,
        size=2,
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
        secret="s3cret",
        job_id="0a1b",
        store_fd=5,
        port_is_held=True,
        num_threads=3,
    )


def test_torchrun_has_its_own_store_on_the_port():
    found = read_rank_environment(TORCHRUN)
    assert (found.rank, found.size, found.local_rank) == (1, 2, 1)
    assert found.master_port == 29501
    assert found.store_fd is None
    assert read_rank_environment({**TORCHRUN, "MASTER_PORT": "65535"}).master_port == 65534


def test_torchrun_ranks_of_a_job_agree_and_jobs_differ():
    def identity(**changes):
        found = read_rank_environment({**TORCHRUN, **changes})
        return found.job_id, found.secret, found.master_port

    assert identity(RANK="0", LOCAL_RANK="0") == identity()
    assert identity(TORCHELASTIC_RUN_ID="run/8")[:2] != identity()[:2]
    assert identity(MASTER_PORT="29600")[:2] != identity()[:2]
    assert all(letter.isalnum() or letter == "-" for letter in identity()[0])


def test_a_rank_without_local_rank_is_its_own():
    assert read_rank_environment(TWO).local_rank == 1


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**TWO, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert read_rank_environment().size == 2
