"""How ranks find rank 0: the private file, the secret, and what an error says was tried."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import polyreme as pr
import pytest
from helpers import HANG_S, refused
from polyreme.environment import RankEnvironment, meet, meeting, private_file
from polyreme.environment.private_file import Told, launcher_identity, told, wait_for

WHAT = Told(host="127.0.0.1", port=4242, secret="s3cret")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the files lie; not there yet."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "polyreme"


def write(path, mode=0o600, **changes):
    """A file as rank 0 writes it, of this process."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    own = {"pid": os.getpid(), "start": private_file.start_of(os.getpid())}
    path.write_text(json.dumps({**own, **vars(WHAT), **changes}))
    path.chmod(mode)
    return path


def a_dead_process():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


# ---- the private file ----


def test_the_file_is_private_and_goes_with_its_folder(folder):
    with told("job", WHAT):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert os.listdir(folder) == ["job"]
        assert stat.S_IMODE((folder / "job").stat().st_mode) == 0o600
        assert wait_for("job", 1) == WHAT
    assert not folder.exists()


def test_the_file_goes_when_the_ranks_do_not_meet(folder):
    with pytest.raises(KeyboardInterrupt), told("job", WHAT):
        raise KeyboardInterrupt
    assert not folder.exists()


def test_the_folder_stays_while_another_job_meets(folder):
    with told("a", WHAT):
        with told("b", WHAT):
            assert sorted(os.listdir(folder)) == ["a", "b"]
        assert os.listdir(folder) == ["a"]
    assert not folder.exists()


def test_many_jobs_that_meet_at_once(folder):
    """The end of one, which removes the folder, does not disturb the start of another."""
    failed = []

    def job(name):
        try:
            for i in range(30):
                with told(f"{name}-{i}", WHAT):
                    assert wait_for(f"{name}-{i}", HANG_S) == WHAT
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=job, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not folder.exists()


@pytest.mark.parametrize("why", ["dead", "another start", "another boot"])
def test_what_a_dead_process_has_left_is_not_believed(folder, why):
    own = private_file.start_of(os.getpid())
    changes = {
        "dead": {"pid": a_dead_process()},
        "another start": {"start": "1" + own},
        "another boot": {"start": own[:-8] + "00000000"},
    }[why]
    stale = write(folder / "job", **changes)
    refused(pr.Timeout, ["0.05 s", str(stale), "living", "MASTER_ADDR"], lambda: wait_for("job", 0.05))
    write(folder / "old", **changes)
    with told("job", WHAT):
        assert wait_for("job", 1) == WHAT
        assert os.listdir(folder) == ["job"]


def test_two_processes_are_rank_0_of_one_job(folder):
    with told("job", WHAT):
        words = ["two processes are rank 0 of job job", str(os.getpid()), str(folder), "POLYREME_JOB_ID"]
        refused(pr.InvalidArgument, words, told("job", WHAT).__enter__)
        assert os.listdir(folder) == ["job"]


def test_a_rank_waits_for_rank_0_and_says_so(folder, caplog, monkeypatch):
    monkeypatch.setattr(private_file, "_PROGRESS_S", 0.05)
    timer = threading.Timer(0.3, lambda: write(folder / "job"))
    timer.start()
    assert wait_for("job", HANG_S) == WHAT
    timer.join()
    assert "waiting for rank 0" in caplog.text
    assert str(folder / "job") in caplog.text


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_folder_that_others_can_open(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    words = [str(folder), "open to other users", f"{mode:04o}", "XDG_RUNTIME_DIR"]
    refused(pr.InvalidArgument, words, told("job", WHAT).__enter__)
    refused(pr.InvalidArgument, words, lambda: wait_for("job", 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_folders_and_files_of_others(folder):
    os.chown(write(folder / "job"), 12345, -1)
    refused(pr.InvalidArgument, ["job", "belongs to user 12345"], lambda: wait_for("job", 1))
    os.chown(folder, 12345, -1)
    refused(pr.InvalidArgument, [str(folder), "belongs to user 12345"], told("job", WHAT).__enter__)


def test_a_file_that_others_can_read(folder):
    write(folder / "job", mode=0o640)
    refused(pr.InvalidArgument, ["job", "0640"], lambda: wait_for("job", 1))


def test_a_link_instead_of_the_folder(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    refused(pr.CommError, [str(folder), "MASTER_ADDR"], told("job", WHAT).__enter__)
    refused(pr.CommError, [str(folder), "MASTER_ADDR"], lambda: wait_for("job", 1))
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"pid": "x"}', '{"pid": null}', "[" * 5000])
def test_a_file_of_something_else(folder, text):
    write(folder / "job").write_text(text)
    refused(pr.InvalidArgument, ["job", "not what rank 0 writes"], lambda: wait_for("job", 1))


def test_a_runtime_folder_that_is_not_ours_is_not_used(folder, monkeypatch, tmp_path):
    """Slurm carries XDG_RUNTIME_DIR to hosts that have no such folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for value in ("", "relative", str(tmp_path / "none"), "/"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        with told("job", WHAT):
            assert wait_for("job", 1) == WHAT
            assert (tmp_path / f"polyreme-{os.geteuid()}" / "job").exists()


# ---- the process that started the ranks ----


def test_ranks_of_one_launcher_have_one_name_for_it(tmp_path):
    """Also with a shell between, and inside another job of the same kind."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\nfrom polyreme.environment.private_file import launcher_identity\n"
        "print(launcher_identity(('PMI_RANK', 'PMI_FD')))\n"
    )

    def identities(**outer):
        starter = tmp_path / "launcher.py"
        starter.write_text(f"""
import os, subprocess, sys
for rank in range(3):
    between = ["sh", "-c", '"$@"; exit $?', "sh"] if rank == 1 else []
    variables = dict(os.environ, PMI_RANK=str(rank), PMI_FD="7")
    subprocess.run([*between, sys.executable, {str(script)!r}], env=variables, check=True)
""")
        done = subprocess.run(
            [sys.executable, str(starter)],
            env={**os.environ, "PYTHONPATH": str(Path(pr.__file__).parent.parent), **outer},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        return done.stdout.split()

    first, second = identities(), identities(PMI_RANK="0", PMI_FD="3")
    assert len(first) == len(second) == 3
    assert len(set(first)) == len(set(second)) == 1
    assert first[0].startswith("launcher-")
    assert first[0] != second[0]


def test_without_variables_nobody_has_started_the_ranks():
    assert launcher_identity(()) == ""


# ---- who is admitted ----


def test_the_secret_of_a_variable_goes_before_that_of_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("of the file\n")
    path.chmod(0o600)
    two = dict(rank=1, size=2, master_port=777, job_id="job")
    for given, expected in (
        (dict(secret="of the variable", secret_file=str(path)), "of the variable"),
        (dict(secret_file=str(path)), "of the file"),
        ({}, "job"),
    ):
        with meet(RankEnvironment(**two, **given), 1) as found:
            assert found.secret == expected
            assert expected == "job" or expected not in repr(found)


@pytest.mark.parametrize(
    "content, mode, words",
    [
        (b"secret", 0o640, ["0640", "0600"]),
        (b"secret", 0o604, ["0604"]),
        (b"", 0o600, ["1 to 4096"]),
        (b" \n", 0o600, ["1 to 4096"]),
        (b"\xff", 0o600, ["ASCII"]),
        (b"x" * 5000, 0o600, ["1 to 4096"]),
    ],
)
def test_a_file_that_is_no_secret(tmp_path, content, mode, words):
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    env = RankEnvironment(rank=1, size=2, master_port=777, secret_file=str(path))
    refused(pr.InvalidArgument, ["POLYREME_SECRET_FILE", str(path), *words], meet(env, 1).__enter__)


def test_a_pipe_is_no_secret(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    env = RankEnvironment(rank=1, size=2, master_port=777, secret_file=str(tmp_path / "pipe"))
    refused(pr.InvalidArgument, ["no regular file"], meet(env, 1).__enter__)


def test_ranks_of_one_host_get_a_random_secret(folder):
    """And a port that already listens, at the address that was asked for and no other."""
    rank = dict(size=2, job_id="job", local_size=2)
    seen = []
    for _ in range(2):
        with (
            meet(RankEnvironment(rank=0, **rank), 1) as first,
            meet(RankEnvironment(rank=1, **rank), 1) as second,
        ):
            assert (first.host, first.port, first.secret) == (second.host, second.port, second.secret)
            assert first.host == "127.0.0.1"
            assert second.store_fd is None
            os.close(first.store_fd)
            seen.append(first.secret)
    assert len(set(seen)) == 2
    assert all(len(secret) == 64 for secret in seen)
    with (
        meet(RankEnvironment(rank=0, secret="given", **rank), 1) as first,
        meet(RankEnvironment(rank=1, secret="given", **rank), 1) as second,
    ):
        os.close(first.store_fd)
        assert first.secret == second.secret == "given"
        assert "given" not in (folder / "job").read_text()


def test_a_socket_that_nobody_took_over_is_closed(folder, tmp_path):
    """Here because the record directory is refused before the store is opened."""
    (tmp_path / "file").touch()
    before = os.listdir("/proc/self/fd")
    env = RankEnvironment(rank=0, size=2, job_id="job", local_size=2)
    record_dir = str(tmp_path / "file" / "records")
    refused(pr.CommError, ["record directory"], lambda: pr.init(environment=env, record_dir=record_dir))
    assert os.listdir("/proc/self/fd") == before


def test_an_address_of_another_host():
    """203.0.113.0/24 is for documentation: nobody has it."""
    env = RankEnvironment(rank=0, size=2, job_id="job", local_size=2, master_addr="203.0.113.7")
    refused(pr.CommError, ["203.0.113.7", "host of rank 0"], meet(env, 1).__enter__)


# ---- torchrun ----


def test_without_pytorch_an_error_says_which_port_was_tried(monkeypatch):
    monkeypatch.setattr(meeting.importlib.util, "find_spec", lambda name: None)
    env = RankEnvironment(
        rank=1, size=2, master_port=29501, agent_port=29500, origin="it is next", job_id="job"
    )

    def fail():
        with meet(env, 1) as found:
            assert (found.host, found.port) == ("127.0.0.1", 29501)
            raise pr.Timeout("nobody listens")

    refused(pr.Timeout, ["nobody listens (it is next; PyTorch", "on all hosts or none"], fail)


@pytest.mark.torch
def test_the_store_of_the_agent(monkeypatch):
    import reference  # noqa: F401  (skips where PyTorch is missing)
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = dict(size=2, agent_port=agent.port, master_port=1, job_id="run-1-0")
    with (
        meet(RankEnvironment(rank=0, **rank), 20) as first,
        meet(RankEnvironment(rank=1, **rank), 20) as second,
    ):
        assert (first.host, first.port) == (second.host, second.port)
        assert first.port not in (0, 1, agent.port)
        os.close(first.store_fd)
    # Another attempt, and another meeting of this one, do not find what was told.
    for job_id in ("run-1-1", "run-1-0"):
        env = RankEnvironment(rank=1, **{**rank, "job_id": job_id})
        words = ["rank 0 has not told", "0.2 s", f"MASTER_PORT={agent.port}", f"polyreme/{job_id}"]
        start = time.monotonic()
        refused(pr.Timeout, words, meet(env, 0.2).__enter__)
        assert time.monotonic() - start < HANG_S


@pytest.mark.torch
def test_no_store_of_an_agent():
    import reference  # noqa: F401  (skips where PyTorch is missing)
    from slurm_cluster import free_ports

    env = RankEnvironment(rank=1, size=2, agent_port=free_ports(1)[0], master_port=1, job_id="job")
    refused(pr.CommError, ["torchrun's store", f"MASTER_PORT={env.agent_port}"], meet(env, 1).__enter__)
