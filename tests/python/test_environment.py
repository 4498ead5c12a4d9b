"""Who a process is, from the variables of its launcher: a pure function that opens nothing."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from random import Random

import polyreme as pr
import pytest
from helpers import HANG_S, clean_environment, refused
from polyreme import _core
from polyreme.environment import RankEnvironment, read_rank_environment
from polyreme.environment.node_list import expand_counts, expand_node_list

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
# As Open MPI 4.1, MPICH 4.0 and Slurm 22.05 set them, in a second rank.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "2126381057",
    "OMPI_MCA_orte_precondition_transports": "d932504a65f09d65-a473e276f90adf7f",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "2126381057",
    "PMIX_RANK": "1",
}
OPEN_MPI_HOSTS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}
PALS = {
    "PALS_APID": "4d1f-9a",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "0",
    "PALS_RANKID": "1",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}
BATCH = {
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# The last of three tasks on two nodes.
SRUN = {
    **BATCH,
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
SRUN_0 = {"SLURMD_NODENAME": "n1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
ONE_NODE = {
    **SRUN,
    **SRUN_0,
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "3",
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
    "local_rank_above_local_size": ({**TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, pr.InvalidArgument, ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"]),
    "local_size_without_local_rank": ({**TWO, "LOCAL_WORLD_SIZE": "1"}, pr.InvalidArgument, ["LOCAL_WORLD_SIZE=1", "LOCAL_RANK"]),
    "threads_are_no_number": ({"POLYREME_NUM_THREADS": "many"}, pr.InvalidArgument, ["POLYREME_NUM_THREADS='many'"]),
    "no_threads": ({"POLYREME_NUM_THREADS": "0"}, pr.InvalidArgument, ["POLYREME_NUM_THREADS=0", "1"]),
    "store_fd_is_no_number": ({**TWO, "POLYREME_LAUNCHER": "run", "POLYREME_STORE_FD": "a"}, pr.InvalidArgument, ["POLYREME_STORE_FD='a'"]),
    "empty_secret": ({**TWO, "POLYREME_SECRET": ""}, pr.InvalidArgument, ["POLYREME_SECRET=''"]),
    "no_secret_file": ({**TWO, "POLYREME_SECRET_FILE": "/none"}, pr.InvalidArgument, ["POLYREME_SECRET_FILE='/none'", "No such file"]),
    "open_mpi_without_rank": (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), pr.InvalidArgument, ["OMPI_COMM_WORLD_SIZE='4'", "OMPI_COMM_WORLD_RANK"]),
    "open_mpi_rank_too_high": ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, pr.InvalidArgument, ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"]),
    "open_mpi_hosts": ({**OPEN_MPI, **OPEN_MPI_HOSTS}, pr.InvalidArgument, ["2 of 4 ranks", "MASTER_ADDR and MASTER_PORT", "mpirun -x MASTER_ADDR=HOST"]),
    "open_mpi_hosts_without_port": ({**OPEN_MPI, **OPEN_MPI_HOSTS, "MASTER_ADDR": "a"}, pr.InvalidArgument, ["need MASTER_PORT", "-x MASTER_PORT"]),
    "hydra_hosts": ({**HYDRA, "PMI_SIZE": "4"}, pr.InvalidArgument, ["2 of 4 ranks", "mpiexec -genv MASTER_ADDR HOST"]),
    "pmi_without_size": (without(HYDRA, "PMI_SIZE"), pr.InvalidArgument, ["PMI_RANK='1'", "PMI_SIZE"]),
    "pals_without_size": ({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1"}, pr.InvalidArgument, ["PALS_RANKID='3'", "PMI_SIZE"]),
    "pmix_alone": ({"PMIX_RANK": "1"}, pr.InvalidArgument, ["PMIX_RANK='1'", "WORLD_SIZE"]),
    "slurm_tasks_per_node": ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}, pr.InvalidArgument, ["SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2"]),
    "srun_without_procid": (without(SRUN, "SLURM_PROCID"), pr.InvalidArgument, ["SLURM_STEP_NUM_TASKS='3'", "SLURM_PROCID"]),
    "srun_procid_too_high": ({**SRUN, "SLURM_PROCID": "3"}, pr.InvalidArgument, ["SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=3"]),
    "srun_without_localid": (without(SRUN, "SLURM_LOCALID"), pr.InvalidArgument, ["SLURM_STEP_NUM_TASKS=3", "SLURM_LOCALID"]),
    "srun_localid_too_high": ({**SRUN, "SLURM_LOCALID": "1"}, pr.InvalidArgument, ["SLURM_LOCALID=1", "0 to 0"]),
    "srun_tasks_do_not_add_up": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, pr.InvalidArgument, ["'2(x2)' has 4", "SLURM_STEP_NUM_TASKS=3"]),
    "srun_tasks_are_no_list": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,x"}, pr.InvalidArgument, ["SLURM_STEP_TASKS_PER_NODE='2,x'", "2(x3),1"]),
    "srun_nodes_are_no_list": ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, pr.InvalidArgument, ["SLURM_STEP_NODELIST='n[1-'", "n[01-03,7],m2"]),
    "srun_too_few_nodes": ({**SRUN, "SLURM_STEP_NODELIST": "n1"}, pr.InvalidArgument, ["SLURM_STEP_NODELIST='n1' has 1", "'2,1' has 2", "MASTER_ADDR"]),
    "srun_task_0_elsewhere": ({**SRUN, **SRUN_0, "SLURMD_NODENAME": "n2"}, pr.InvalidArgument, ["SLURMD_NODENAME='n2'", "'n[1-2]'", "MASTER_ADDR"]),
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
    if "POLYREME_SECRET_FILE" not in environ:  # a file is read when the ranks meet
        refused(error, words, lambda: read_rank_environment(environ))
    for variable in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(variable)
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
        BATCH,
        {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
        # So is a step of one task, which srun leaves the job's --ntasks-per-node; with PMIx too.
        {**SRUN, **SRUN_0, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
        {**SRUN, **SRUN_0, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=lambda environ: ",".join(environ)[:40] or "empty",
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
        launcher="polyreme run",
        rank=0,
        size=2,
        local_rank=0,
        local_size=2,
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
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert found.agent_port == 29500
    assert found.master_port == 29501
    assert read_rank_environment(without(TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE")).agent_port == 0
    assert found.store_fd is None
    assert read_rank_environment({**TORCHRUN, "MASTER_PORT": "65535"}).master_port == 65534


def test_torchrun_ranks_of_a_job_agree_and_jobs_differ():
    def identity(**changes):
        found = read_rank_environment({**TORCHRUN, **changes})
        return found.job_id, found.master_port

    assert identity(RANK="0", LOCAL_RANK="0") == identity()
    assert identity(TORCHELASTIC_RUN_ID="run/8")[0] != identity()[0]
    assert identity(TORCHELASTIC_RESTART_COUNT="1")[0] != identity()[0]
    assert identity(MASTER_PORT="29600")[0] != identity()[0]
    assert all(letter.isalnum() or letter == "-" for letter in identity()[0])


def test_a_rank_without_local_rank_is_its_own():
    assert read_rank_environment(TWO).local_rank == 1


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**TWO, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert read_rank_environment().size == 2


def who(environ):
    found = read_rank_environment(environ)
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


def where(environ):
    found = read_rank_environment(environ)
    return found.master_addr, found.master_port


# Each line has the variables of all the launchers below it, and none of those above.
PRECEDENCE = [
    ("polyreme run", {"POLYREME_LAUNCHER": "run", "TORCHELASTIC_RUN_ID": "x"}),
    ("torchrun", {"TORCHELASTIC_RUN_ID": "x"}),
    ("RANK and WORLD_SIZE", TWO),
    ("Open MPI", OPEN_MPI),
    ("PMI", PALS),
    ("Slurm", ONE_NODE),
    ("none", {}),
]


@pytest.mark.parametrize("i", range(len(PRECEDENCE)), ids=[name for name, _ in PRECEDENCE])
def test_the_first_launcher_of_the_list_decides(i):
    environ = {}
    for _, variables in PRECEDENCE[i:]:
        environ = {**variables, **environ}
    assert read_rank_environment(environ).launcher == PRECEDENCE[i][0]


@pytest.mark.parametrize(
    "environ, expected",
    [
        (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
        ({**TWO, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ("RANK and WORLD_SIZE", 1, 2, 0, 1)),
        (OPEN_MPI, ("Open MPI", 1, 4, 1, 4)),
        (HYDRA, ("PMI", 1, 2, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("PMI", 1, 2, 1, 2)),
        (PALS, ("PMI", 1, 4, 1, 4)),
        ({**without(PALS, "PMI_RANK"), "PALS_LOCAL_SIZE": "4"}, ("PMI", 1, 4, 1, 4)),
        (SRUN, ("Slurm", 2, 3, 0, 1)),
        (ONE_NODE, ("Slurm", 1, 3, 1, 3)),
        # PMI or PMIx of srun itself.
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "11", "PMI_JOBID": "7.0"}, ("Slurm", 2, 3, 0, 1)),
        ({**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, ("Slurm", 2, 3, 0, 1)),
        ({**SRUN, "PALS_RANKID": "2"}, ("Slurm", 2, 3, 0, 1)),
        # mpirun in an allocation: Slurm knows its daemons, one per node.
        ({**BATCH, **OPEN_MPI}, ("Open MPI", 1, 4, 1, 4)),
        ({**SRUN, **SRUN_0, "SLURM_STEP_NUM_TASKS": "1", **OPEN_MPI}, ("Open MPI", 1, 4, 1, 4)),
        ({**SRUN, **SRUN_0, "SLURM_STEP_NUM_TASKS": "1", **HYDRA}, ("PMI", 1, 2, 1, 2)),
        # torchrun under srun, one agent per node.
        ({**SRUN, **TORCHRUN}, ("torchrun", 1, 2, 1, 2)),
    ],
)  # fmt: skip
def test_who_a_process_is(environ, expected):
    assert who(environ) == expected


HOSTS = {**OPEN_MPI, **OPEN_MPI_HOSTS}


@pytest.mark.parametrize(
    "environ, expected",
    [
        # One host: rank 0 binds a free port and tells it.
        (OPEN_MPI, ("127.0.0.1", 0)),
        (HYDRA, ("127.0.0.1", 0)),
        (ONE_NODE, ("127.0.0.1", 0)),
        # What the user has set counts.
        ({**OPEN_MPI, "MASTER_ADDR": "10.0.0.1"}, ("10.0.0.1", 0)),
        ({**ONE_NODE, "MASTER_PORT": "777"}, ("127.0.0.1", 777)),
        ({**HOSTS, "MASTER_ADDR": "a", "MASTER_PORT": "777"}, ("a", 777)),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "777"}, ("a", 777)),
        ({**SRUN, "MASTER_PORT": "777"}, ("n1", 777)),
        ({**SRUN, "MASTER_PORT": "777", "SLURM_STEP_NODELIST": "gpu[08-10],a1"}, ("gpu08", 777)),
    ],
)
def test_where_rank_0_listens(environ, expected):
    assert where(environ) == expected


def test_the_port_of_a_job_of_slurm_is_its_own():
    address, port = where(SRUN)
    assert address == "n1"
    assert 10000 <= port < 30000
    assert where({**SRUN, **SRUN_0}) == (address, port)
    assert where({**SRUN, "SLURM_STEP_ID": "1"})[1] != port
    assert where({**SRUN, "SLURM_JOB_ID": "8"})[1] != port


def test_jobs_of_a_launcher_have_names_of_their_own():
    def name(environ, **changes):
        return read_rank_environment({**environ, **changes}).job_id

    assert name(OPEN_MPI) != name(OPEN_MPI, OMPI_MCA_orte_precondition_transports="other")
    assert name(SRUN) == name({**SRUN, **SRUN_0}) != name(SRUN, SLURM_RESTART_COUNT="1")
    assert name(PALS) != name(PALS, PALS_APID="other")
    assert name(HYDRA) == ""  # the process that starts the ranks names it
    hosts = {**HYDRA, "PMI_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "777"}
    assert name(hosts) == "job-777"  # on several hosts it is not the same one
    long = name(OPEN_MPI, PMIX_NAMESPACE="prterun-" + "x" * 90 + "-77@1")
    assert len(long) == 64
    assert long != name(OPEN_MPI, PMIX_NAMESPACE="prterun-" + "x" * 90 + "-78@1")
    for environ in (OPEN_MPI, SRUN, PALS, TORCHRUN):
        assert name(environ, POLYREME_JOB_ID="mine") == "mine"


def test_no_text_shows_the_secret():
    assert "s3cret" not in repr(read_rank_environment({**TWO, "POLYREME_SECRET": "s3cret"}))


def test_cpus_that_slurm_gives_each_task():
    assert read_rank_environment({**SRUN, "SLURM_CPUS_PER_TASK": "3"}).cpus_per_rank == 3
    assert read_rank_environment(SRUN).cpus_per_rank is None


# ---- Slurm's lists ----


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", ["n1"]),
        ("n[01-03,7],m2", ["n01", "n02", "n03", "n7", "m2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-10]-ib", ["n08-ib", "n09-ib", "n10-ib"]),
        ("r[1-2]n[0,3]", ["r1n0", "r1n3", "r2n0", "r2n3"]),
        ("a.b-c_d,e", ["a.b-c_d", "e"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand_node_list("X", text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "n[", "n]", "n[]", "n[1", "n[1-]", "n[-1]", "n[2-1]", "n[a]", "n[1,,2]", "n[[1]]", "n 1", "n;x",
     "(null)", "n[0-9999999]", "n[0-999][0-999][0-999]", "n[0-999999,0-999999]"],
)  # fmt: skip
def test_lists_that_are_none(text):
    refused(pr.InvalidArgument, [f"X={text!r}"], lambda: expand_node_list("X", text))


def test_lists_of_hosts_are_what_slurm_would_write():
    """Random lists of hosts, in the short form, come back."""
    random = Random(0)
    for _ in range(300):
        hosts, items = [], []
        for letter in random.sample("abcdefg", random.randint(1, 4)):
            width, ranges = random.randint(1, 3), []
            for _ in range(random.randint(1, 3)):
                first = random.randint(0, 10**width - 1)
                last = min(10**width - 1, first + random.randint(0, 5))
                ranges.append(f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else ""))
                hosts += [f"{letter}{number:0{width}d}" for number in range(first, last + 1)]
            items.append(f"{letter}[{','.join(ranges)}]")
        assert expand_node_list("X", ",".join(items)) == hosts


def test_lists_of_counts():
    assert expand_counts("X", "2") == [2]
    assert expand_counts("X", "2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2,", "(x2)", "2(x)", "2(3)", "-1", "1(x9999999)", "2 (x2)"):
        refused(pr.InvalidArgument, [f"X={text!r}"], functools.partial(expand_counts, "X", text))
