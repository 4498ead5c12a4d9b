"""The local launcher: what a rank finds, and arguments.

Real processes and real signals. Time limits only guard against hangs; they are far above what the launcher
needs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_job import CLEAN, HANG_S, Job

pytestmark = pytest.mark.mp

# --- what a rank finds ---


def test_environment_and_arguments_of_ranks(job: Job) -> None:
    script = """
    import json
    names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT POLYREME_JOB_ID"
             " POLYREME_SECRET POLYREME_LAUNCHER POLYREME_STORE_FD").split()
    print(json.dumps([sys.argv[1:], {n: os.environ.get(n) for n in names}]))
    """
    done = job.run(script, "--prefix", "never", num_ranks=3, arguments=("--a", "b c", "-n", "--"))
    assert done.code == 0
    assert done.err == ""
    found = sorted((json.loads(line) for line in done.out.splitlines()), key=lambda f: f[1]["RANK"])
    assert [f[0] for f in found] == [["--a", "b c", "-n", "--"]] * 3
    for rank, (_, got) in enumerate(found):
        assert got["RANK"] == got["LOCAL_RANK"] == str(rank)
        assert got["WORLD_SIZE"] == got["LOCAL_WORLD_SIZE"] == "3"
        assert got["MASTER_ADDR"] == "127.0.0.1"
        assert got["POLYREME_LAUNCHER"] == "run"
        assert (got["POLYREME_STORE_FD"] is not None) == (rank == 0)
    for name in ("MASTER_PORT", "POLYREME_JOB_ID", "POLYREME_SECRET"):
        assert len({got[name] for _, got in found}) == 1
    assert re.fullmatch("[0-9a-f]{64}", found[0][1]["POLYREME_SECRET"])


def test_secret_is_on_no_command_line_and_in_no_report(job: Job) -> None:
    process = job.start(
        """
        if rank == 0:
            print(os.environ["POLYREME_SECRET"])
        meet("up")
        time.sleep(1000)
        """,
        "--json",
        "--prefix",
        "never",
    )
    job.wait_for("up")
    command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.processes()]
    process.terminate()
    done = job.wait(process)
    secret = done.out.strip()
    assert len(command_lines) >= 3
    assert secret
    assert all(secret.encode() not in line for line in command_lines)
    assert secret not in done.err


def test_rank_0_inherits_the_listening_socket(job: Job) -> None:
    done = job.run(
        """
        import socket
        port = int(os.environ["MASTER_PORT"])
        if rank == 0:
            listener = socket.socket(fileno=int(os.environ["POLYREME_STORE_FD"]))
            assert listener.getsockname() == ("127.0.0.1", port)
            connection, _ = listener.accept()
            print(connection.recv(100).decode())
        else:
            # Nobody has to retry: the socket listens before any rank exists.
            socket.create_connection(("127.0.0.1", port)).sendall(b"from rank 1")
        """
    )
    assert (done.code, done.out, done.err) == (0, "[0] from rank 1\n", "")


def test_o_fl_09_jobs_started_at_once_get_ports_of_their_own(job: Job) -> None:
    script = 'print(os.environ["MASTER_PORT"]); meet(os.environ["POLYREME_JOB_ID"])'
    processes = [job.start(script, "--prefix", "never") for _ in range(6)]
    ports = [set(job.wait(process).out.split()) for process in processes]
    assert all(len(found) == 1 for found in ports)
    assert len(set.union(*ports)) == 6


def test_o_fl_09_f06_port_of_a_foreign_listener_is_refused(job: Job) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        done = job.run("print('started')", "--port", str(port))
    assert done.code == 2
    assert done.out == ""
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.err


def test_explicit_port(job: Job) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = job.run('print(os.environ["MASTER_PORT"])', "--port", str(port), num_ranks=1)
    assert done.out == f"{port}\n"


def test_cpu_shares(job: Job) -> None:
    cpus = len(os.sched_getaffinity(0))
    script = """
    import json
    print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ["POLYREME_NUM_THREADS"],
                      os.environ["OMP_NUM_THREADS"]]))
    """
    for num_ranks in (2, cpus + 1):
        done = job.run(script, "--prefix", "never", num_ranks=num_ranks)
        found = [json.loads(line) for line in done.out.splitlines()]
        shares = [cpu for share, _, _ in found for cpu in share]
        threads = {int(value) for _, *values in found for value in values}
        assert len(found) == num_ranks
        if num_ranks > cpus:
            assert threads == {1}
            assert len(shares) == cpus * num_ranks
        elif len(set(shares)) == len(shares):
            assert threads == {len(shares) // num_ranks}
        else:
            pytest.skip("a CPU quota below the CPUs: no binding here")


def test_modules_and_exit_codes(job: Job) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "polyreme", "run", "-n", "2", "-m", "platform", "--terse"],
        env=job.environment,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert process.returncode == 0
    assert re.fullmatch(rb"(\[[01]\] Linux.*\n){2}", process.stdout)
    assert job.run("sys.exit(3 if rank == 1 else 0)").code == 3
    assert job.run("meet('up'); os.abort() if rank == 1 else time.sleep(100)").code == 134


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], "the number of ranks is 0; give -n 1 to 1024"),
        (["-n", "99999", "x.py"], "the number of ranks is 99999; give -n 1 to 1024"),
        (["-n", "2", "absent.py"], "script 'absent.py' does not exist"),
        (["-n", "2"], "no script given"),
        (["-n", "two", "x.py"], "invalid int value: 'two'"),
        (["x.py"], "-n/--num-ranks"),
    ],
)
def test_arguments_are_checked_first(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polyreme", "run", *arguments],
        env=CLEAN,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr.decode()


def test_o_fl_08_launch_inside_a_launch_is_refused(job: Job) -> None:
    job.environment.update(RANK="0", WORLD_SIZE="2")
    done = job.run("print('started', rank, world)")
    assert done.code == 2
    assert "RANK=0, WORLD_SIZE=2" in done.err
    assert "--nested" in done.err
    done = job.run("print('started', rank, world)", "--nested")
    assert sorted(done.out.splitlines()) == ["[0] started 0 2", "[1] started 1 2"]
