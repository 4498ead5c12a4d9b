"""The pure parts of the local launcher: lines, prefixes, environment, CPU shares, decisions."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from polyreme.launch import cgroup, env, report, supervisor
from polyreme.launch.config import LaunchConfig, LaunchError
from polyreme.launch.output import LineSplitter, mark_line
from polyreme.launch.supervisor import Supervisor

SCRIPT = __file__


def config(**changes: object) -> LaunchConfig:
    fields: dict[str, object] = {"num_ranks": 3, "command": (SCRIPT,), **changes}
    return LaunchConfig(**fields)  # type: ignore[arg-type]


# --- lines ---


def test_lines_do_not_depend_on_how_the_stream_is_cut() -> None:
    rng = random.Random(1)
    stream = b"".join(
        bytes(rng.choices(b"ab{\r", k=rng.randrange(40))) + b"\n" * rng.randrange(3) for _ in range(200)
    )
    expected = stream.split(b"\n")
    if not expected[-1]:
        expected.pop()
    for _ in range(20):
        splitter = LineSplitter()
        lines: list[bytes] = []
        start = 0
        while start < len(stream):
            size = rng.randrange(1, 60)
            lines += splitter.feed(stream[start : start + size])
            start += size
        assert lines + splitter.finish() == expected


def test_line_without_end_is_cut_and_memory_stays_bounded() -> None:
    splitter = LineSplitter(max_line_bytes=100)
    lines: list[bytes] = []
    for _ in range(1000):
        lines += splitter.feed(b"x" * 37)
        assert len(splitter._pending) <= 100
    lines += splitter.finish()
    assert b"".join(lines) == b"x" * 37000
    assert max(len(line) for line in lines) == 100


def test_cut_does_not_fall_inside_a_utf8_character() -> None:
    splitter = LineSplitter(max_line_bytes=8)
    text = "a\u20ac\u20ac\u20ac\u20ac\U0001f600\u00e9" * 9
    lines = splitter.feed(text.encode()) + splitter.finish()
    assert "".join(line.decode() for line in lines) == text
    lines = splitter.feed(b"\x80" * 20) + splitter.finish()  # no text at all: still cut
    assert b"".join(lines) == b"\x80" * 20
    assert max(len(line) for line in lines) <= 8


def test_line_of_exactly_the_limit_stays_whole() -> None:
    splitter = LineSplitter(max_line_bytes=8)
    assert splitter.feed(b"12345678\n123456789\n\n") == [b"12345678", b"12345678", b"9", b""]


@pytest.mark.parametrize(
    ("mode", "rank", "num_ranks", "line", "expected"),
    [
        ("always", 0, 1, b"a", b"[0] a"),
        ("always", 0, 2, b"{}", b"[0] {}"),
        ("never", 1, 2, b"a", b"a"),
        ("auto", 0, 1, b"a", b"a"),
        ("auto", 0, 2, b"a", b"[0] a"),
        ("auto", 0, 2, b'{"a": 1}', b'{"a": 1}'),
        ("auto", 12, 16, b'{"a": 1}', b'[12] {"a": 1}'),
    ],
)
def test_prefix(mode: str, rank: int, num_ranks: int, line: bytes, expected: bytes) -> None:
    assert mark_line(line, rank=rank, num_ranks=num_ranks, mode=mode) == expected


# --- environment ---


def job(**changes: object) -> env.JobSettings:
    fields: dict[str, object] = {
        "num_ranks": 4,
        "port": 1234,
        "job_id": "ab",
        "secret": "s" * 64,
        "num_threads": 2,
        **changes,
    }
    return env.JobSettings(**fields)  # type: ignore[arg-type]


def test_rank_environment_has_all_launch_variables() -> None:
    got = env.rank_environment({"PATH": "/bin", env.STORE_FD: "9"}, job(), rank=3)
    assert got == {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "POLYREME_JOB_ID": "ab",
        "POLYREME_SECRET": "s" * 64,
        "POLYREME_LAUNCHER": "run",
        "POLYREME_RESTART_COUNT": "0",
        "POLYREME_NUM_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "PYTHONFAULTHANDLER": "1",
    }


def test_number_of_threads_set_by_the_user_stays() -> None:
    base = {"POLYREME_NUM_THREADS": "7", "OMP_NUM_THREADS": "5"}
    got = env.rank_environment(base, job(), rank=0, store_fd=11)
    assert (got["POLYREME_NUM_THREADS"], got["OMP_NUM_THREADS"]) == ("7", "5")
    assert got["POLYREME_STORE_FD"] == "11"


def test_secret_is_not_in_any_representation() -> None:
    assert "s" * 64 not in repr(job())
    assert "s" * 64 not in str(job())


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, []),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0", "WORLD_SIZE=2"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, []),  # a batch script, not a step
        ({"SLURM_STEP_NUM_TASKS": "1"}, []),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "PMI_RANK": "0"}, []),  # srun -n 1 --mpi=pmix
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, []),  # mpirun -n 1
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_RANK=0"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_STEP_NUM_TASKS=4"]),
    ],
)
def test_foreign_launch(environ: dict[str, str], found: list[str]) -> None:
    assert env.foreign_launch(environ) == found


def test_cpu_shares_are_equal_contiguous_and_disjoint() -> None:
    plan = env.plan_cpus([0, 4, 1, 5, 2, 6, 3], 3)
    assert plan == env.CpuPlan(bindings=((0, 4), (1, 5), (2, 6)), num_threads=2)


@pytest.mark.parametrize(
    ("num_cpus", "num_ranks", "quota", "bind", "num_threads"),
    [
        (2, 4, None, "auto", 1),  # too few
        (8, 2, None, "none", 4),
        (8, 1, None, "auto", 8),
        (8, 2, 4.5, "auto", 2),  # quota below the CPUs
        (8, 2, 1.0, "auto", 1),
        (8, 16, 4.0, "auto", 1),
    ],
)
def test_cpus_are_not_bound(
    num_cpus: int, num_ranks: int, quota: float | None, bind: str, num_threads: int
) -> None:
    plan = env.plan_cpus(range(num_cpus), num_ranks, quota=quota, bind=bind)
    assert plan == env.CpuPlan(bindings=None, num_threads=num_threads)


def test_cgroup_v2_and_v1(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    root = str(tmp_path)
    assert cgroup.oom_kills(root) is None
    assert cgroup.memory_limit_bytes(root) is None
    assert cgroup.cpu_quota(root) is None
    put("proc/self/cgroup", "0::/a/b\n")
    put("sys/fs/cgroup/a/b/memory.events", "low 0\noom 1\noom_kill 3\n")
    put("sys/fs/cgroup/a/b/memory.max", "max\n")
    put("sys/fs/cgroup/a/memory.max", "1000000\n")
    put("sys/fs/cgroup/a/b/cpu.max", "150000 100000\n")
    assert cgroup.oom_kills(root) == 3
    assert cgroup.memory_limit_bytes(root) == 1000000
    assert cgroup.cpu_quota(root) == 1.5
    put("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n")
    put("sys/fs/cgroup/memory/x/memory.oom_control", "under_oom 0\noom_kill 5\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "-1\n")
    put("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n")
    assert cgroup.oom_kills(root) == 5
    assert cgroup.memory_limit_bytes(root) is None
    assert cgroup.cpu_quota(root) is None


# --- arguments ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 0}, "number of ranks is 0"),
        ({"num_ranks": -2}, "number of ranks is -2"),
        ({"command": ()}, "no script given"),
        ({"command": ("absent.py",)}, "'absent.py' does not exist"),
        ({"command": ("--flag",)}, "neither an option"),
        ({"command": (str(Path(SCRIPT).parent),)}, "directory without __main__.py"),
        ({"bind": "x"}, "bind is 'x'"),
        ({"prefix": "x"}, "prefix is 'x'"),
        ({"port": 70000}, "port is 70000"),
        ({"grace_s": -1.0}, "grace_s is -1"),
        ({"kill_after_s": float("nan")}, "kill_after_s is nan"),
    ],
)
def test_arguments_are_checked_first(changes: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        config(**changes)


# --- decisions ---


def roles(boss: Supervisor) -> dict[int, str]:
    return {end.rank: end.role for end in boss.ends}


def test_first_failure_ends_the_others_within_a_second() -> None:
    boss = Supervisor(config(), start=0.0)
    assert boss.deadline() is None
    boss.on_ends([(1, 1)], 10.0)
    now = 10.0
    sent: list[tuple[int, float]] = []
    while (deadline := boss.deadline()) is not None and len(sent) < 2:
        now = deadline
        sent += [(number, now) for number in boss.due(now)]
    assert [number for number, _ in sent] == [signal.SIGTERM, signal.SIGKILL]
    assert now <= 10.8
    boss.on_ends([(0, -signal.SIGTERM), (2, -signal.SIGKILL)], now)
    assert boss.done
    assert roles(boss) == {1: "cause", 0: "consequence", 2: "consequence"}
    assert boss.exit_code() == 1


def test_f30_two_ranks_killed_within_10_ms_are_both_causes() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(2, -9)], 1.0)
    assert boss.due(1.005) == []
    boss.on_ends([(0, -9)], 1.008)
    assert boss.due(1.05) == [signal.SIGTERM]
    boss.on_ends([(1, -15)], 1.06)
    assert roles(boss) == {2: "cause", 0: "cause", 1: "consequence"}
    assert boss.exit_code() == 137


def test_signal_death_comes_before_the_errors_it_made() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(0, 1), (1, 0), (2, -11)], 1.0)
    assert [end.rank for end in boss.ends] == [2, 0, 1]
    assert boss.exit_code() == 139


def test_death_by_a_signal_that_was_not_sent_is_no_consequence() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(0, 3)], 1.0)
    assert boss.due(1.1) == [signal.SIGTERM]
    boss.on_ends([(1, -11), (2, 7)], 1.2)
    assert roles(boss) == {0: "cause", 1: "also_failed", 2: "consequence"}
    assert boss.exit_code() == 3


def test_stop_has_a_grace_period_and_second_sigint_kills() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_signal(signal.SIGINT, 1.0)
    assert boss.due(1.0) == [signal.SIGINT]
    assert boss.deadline() == 11.0
    boss.on_ends([(0, 0)], 2.0)
    boss.on_signal(signal.SIGINT, 3.0)
    assert boss.due(3.0) == [signal.SIGINT, signal.SIGKILL]
    boss.on_ends([(1, -9), (2, -9)], 3.1)
    assert roles(boss) == {0: "finished", 1: "stopped", 2: "stopped"}
    assert boss.exit_code() == 130


def test_graceful_stop_exits_0() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_signal(signal.SIGTERM, 1.0)
    assert boss.due(1.0) == [signal.SIGTERM]
    boss.on_ends([(0, 0), (1, 0), (2, 0)], 2.0)
    assert boss.exit_code() == 0


def test_other_signals_are_only_passed_on() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_signal(signal.SIGUSR1, 1.0)
    assert boss.due(1.0) == [signal.SIGUSR1]
    assert boss.deadline() is None


def test_early_exit_counts_as_failure_when_asked() -> None:
    boss = Supervisor(config(exit_grace_s=5.0), start=0.0)
    boss.on_ends([(1, 0)], 1.0)
    assert boss.deadline() == 6.0
    assert boss.due(6.0) == [signal.SIGTERM]
    boss.on_ends([(0, -15), (2, -15)], 6.001)
    assert roles(boss) == {1: "early_exit", 0: "consequence", 2: "consequence"}
    assert boss.exit_code() == 1


def test_early_exit_is_noticed_without_killing_anybody() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(1, 0)], 1.0)
    assert boss.stragglers(30.0) == ()
    assert boss.stragglers(31.0) == (0, 2)
    assert boss.stragglers(32.0) == ()
    assert boss.due(1e6) == []
    boss.on_ends([(0, 0), (2, 0)], 100.0)
    assert boss.exit_code() == 0


def test_rank_that_does_not_end_by_sigkill_is_given_up() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(0, 1), (1, 1)], 1.0)
    assert set(boss.due(2.0)) == {signal.SIGTERM, signal.SIGKILL}
    assert boss.killed
    assert not boss.done
    assert boss.due(20.0) == []
    assert boss.done
    assert roles(boss)[2] == "abandoned"
    assert boss.exit_code() == 1


# --- report ---


def result(boss: Supervisor, **changes: object) -> report.LaunchResult:
    fields: dict[str, object] = {
        "exit_code": boss.exit_code(),
        "seconds": 9.0,
        "job_id": "ab",
        "num_ranks": 3,
        "stop_signal": boss.stop_signal,
        "ends": tuple(boss.ends),
        "facts": {r: report.RankFacts(pid=100 + r) for r in range(3)},
        **changes,
    }
    return report.LaunchResult(**fields)  # type: ignore[arg-type]


def test_f29_out_of_memory_is_told_with_peak_and_limit() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(1, -9)], 1.0)
    facts = {r: report.RankFacts(pid=100 + r) for r in range(3)}
    facts[1] = report.RankFacts(pid=101, peak_rss_bytes=200 << 20, oom_kills=1)
    text = "\n".join(report.as_text(result(boss, facts=facts, memory_limit_bytes=256 << 20)))
    assert "rank 1 (pid 101) was ended by SIGKILL" in text
    assert "oom_kill=1, peak RSS 200 MiB of limit 256 MiB" in text


def test_report_is_silent_when_all_went_well() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(0, 0), (1, 0), (2, 0)], 1.0)
    assert report.as_text(result(boss)) == []
    assert report.as_json(result(boss))["first_cause"] is None


def test_earlier_exit_0_is_named_when_another_rank_fails() -> None:
    boss = Supervisor(config(), start=0.0)
    boss.on_ends([(1, 0)], 1.0)
    boss.on_ends([(0, 1)], 3.0)
    text = "\n".join(report.as_text(result(boss)))
    assert "2.0 s earlier, rank 1 (pid 101) exited with code 0" in text
    assert report.as_json(result(boss))["early_exits"] == [1]
    assert boss.exit_code() == 1
    assert roles(boss)[0] == supervisor.CAUSE
