"""The last word of a launch: what failed first, and what followed from it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from . import supervisor
from .supervisor import RankEnd


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What the launcher knows of a rank beside its end.

    oom_kills: processes of the control group that the out-of-memory killer ended meanwhile.
    tail: last lines of its stderr (of its terminal, where it had one).
    """

    pid: int
    peak_rss_bytes: int = 0
    oom_kills: int | None = None
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What came of a launch, of its last start. Times in seconds since that; restarts: how many there were before."""

    exit_code: int
    seconds: float
    job_id: str
    num_ranks: int
    stop_signal: int | None
    ends: tuple[RankEnd, ...]
    facts: dict[int, RankFacts]
    memory_limit_bytes: int | None = None
    forwarded: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()
    restarts: int = 0


def signal_name(number: int) -> str:
    """`SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def as_json(result: LaunchResult) -> dict[str, object]:
    """The report for programs: plain values only."""
    causes = _with_role(result, supervisor.CAUSE, supervisor.EARLY_EXIT)
    first: dict[str, object] | None = None
    if causes:
        first = _rank_json(result, causes[0])
        first["hint"] = _hint(result, causes[0])
        first["stderr_tail"] = list(result.facts[causes[0].rank].tail)
    stop = result.stop_signal
    return {
        "event": "launch_report",
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 3),
        "job_id": result.job_id,
        "num_ranks": result.num_ranks,
        "restarts": result.restarts,
        "stopped_by": None if stop is None else signal_name(stop),
        "first_cause": first,
        "causes": [end.rank for end in causes],
        "early_exits": [end.rank for end in _finished_before_failure(result)],
        "ranks": [_rank_json(result, end) for end in sorted(result.ends, key=lambda e: e.rank)],
        "leftovers": list(result.leftovers),
    }


def as_text(result: LaunchResult) -> list[str]:
    """The report for people, as lines; empty if all went well."""
    lines: list[str] = []
    causes = _with_role(result, supervisor.CAUSE, supervisor.EARLY_EXIT)
    for end in causes:
        facts = result.facts[end.rank]
        hint = _hint(result, end)
        lines.append(
            f"rank {end.rank} (pid {facts.pid}) {_verb(end)} after {end.at:.1f} s"
            + (f": {hint}" if hint else "")
        )
        if facts.tail:
            lines.append(f"last lines of rank {end.rank}:")
            lines += [f"  {line}" for line in facts.tail]
    if len(causes) > 1:
        numbers = " and ".join(str(end.rank) for end in causes)
        lines.append(f"ranks {numbers} failed together; which came first cannot be told")
    lines += _early_exit_lines(result)
    lines += _other_lines(result)
    lines += [f"could not remove {name}" for name in result.leftovers]
    if lines or result.exit_code:
        lines.append(f"exit code {result.exit_code}")
    return lines


def _rank_json(result: LaunchResult, end: RankEnd) -> dict[str, object]:
    facts = result.facts[end.rank]
    code = end.code
    return {
        "rank": end.rank,
        "pid": facts.pid,
        "role": end.role,
        "exit_code": code if code is not None and code >= 0 else None,
        "signal": signal_name(-code) if code is not None and code < 0 else None,
        "seconds": round(end.at, 3),
        "peak_rss_bytes": facts.peak_rss_bytes,
    }


def _with_role(result: LaunchResult, *roles: str) -> list[RankEnd]:
    return [end for end in result.ends if end.role in roles]


def _how(end: RankEnd) -> str:
    if end.code is None:
        return "still there after SIGKILL: it hangs inside the kernel"
    return f"exit code {end.code}" if end.code >= 0 else signal_name(-end.code)


def _verb(end: RankEnd) -> str:
    if end.role == supervisor.EARLY_EXIT:
        return "exited with code 0 while other ranks went on, too long before them"
    if end.code is not None and end.code < 0:
        return f"was ended by {signal_name(-end.code)}"
    return f"failed with {_how(end)}"


def _hint(result: LaunchResult, end: RankEnd) -> str:
    if end.code is None or end.code >= 0:
        return ""
    number = -end.code
    if number in result.forwarded:
        return f"the launcher received {signal_name(number)} and passed it on"
    if number != signal.SIGKILL:
        return ""
    facts = result.facts[end.rank]
    peak = f"peak RSS {_mib(facts.peak_rss_bytes)}"
    if result.memory_limit_bytes is not None:
        peak += f" of limit {_mib(result.memory_limit_bytes)}"
    if facts.oom_kills:
        return f"out of memory, oom_kill={facts.oom_kills}, {peak}; use less memory per rank"
    if facts.oom_kills == 0:
        return f"killed from outside, not by the out-of-memory killer (oom_kill=0, {peak})"
    return f"perhaps by the out-of-memory killer ({peak}); see the kernel log"


def _finished_before_failure(result: LaunchResult) -> list[RankEnd]:
    failures = _with_role(result, supervisor.CAUSE)
    if not failures:
        return []
    finished = _with_role(result, supervisor.FINISHED)
    return [end for end in finished if end.at < failures[0].at]


def _early_exit_lines(result: LaunchResult) -> list[str]:
    failures = _with_role(result, supervisor.CAUSE)
    return [
        f"before that, {failures[0].at - end.at:.1f} s earlier, rank {end.rank}"
        f" (pid {result.facts[end.rank].pid}) exited with code 0; if the error above is a lost"
        " peer, this early exit is its cause"
        for end in _finished_before_failure(result)
    ]


def _other_lines(result: LaunchResult) -> list[str]:
    lines: list[str] = []
    if result.stop_signal is not None:
        lines.append(f"stopped by {signal_name(result.stop_signal)}")
    titles = (
        (supervisor.ALSO_FAILED, "failed after it"),
        (supervisor.CONSEQUENCE, "ended as a consequence"),
        (supervisor.STOPPED, "ended by the stop"),
        (supervisor.ABANDONED, "left behind"),
    )
    for role, title in titles:
        ends = _with_role(result, role)
        if ends:
            lines.append(f"{title}: {_list_ends(ends)}")
    if result.stop_signal is not None and result.exit_code == 0:
        lines.append("all ranks ended in order")
    return lines


def _list_ends(ends: Sequence[RankEnd]) -> str:
    return ", ".join(f"rank {end.rank} ({_how(end)})" for end in sorted(ends, key=lambda e: e.rank))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
