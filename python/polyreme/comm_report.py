"""The verdict on a job's collectives, from the journals of its ranks.

Operations of one group are matched by their sequence numbers. The verdict is about the first operation of
each group that did not end on every rank: who never arrived there, who waited, what the missing ranks did
last. Arrival is when a rank's stream reached the operation; its lag is how much later than the first rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exchange_report import StuckExchange, find_stuck_exchanges
from .journal import Journal, clean, read_directory

__all__ = ["Report", "examine", "render"]

# Numbered by each rank for itself.
_NOT_COLLECTIVE = {"exchange"}
_FIELDS = ("operation", "dtype", "count", "counts_hash", "reduction", "root")


@dataclass
class StuckOperation:
    """The first operation of a group that did not end everywhere.

    missing: ranks that never arrived, with what they did last and what they posted next.
    waiting: seconds that the others waited, by rank; None where the journal does not tell.
    unknown: how many members have no journal.
    """

    group: str
    members: list[int]  # that have a journal
    sequence: int
    operation: str
    label: str
    missing: dict[int, dict[str, str]]
    waiting: dict[int, float | None]
    unknown: int


@dataclass
class Mismatch:
    """The first operation of a group that ranks called differently; calls: text -> ranks."""

    group: str
    sequence: int
    calls: dict[str, list[int]]


@dataclass
class Lag:
    """How late a rank was, over the operations that can be compared. last: how often it was the last one."""

    rank: int
    operations: int
    median_ms: float
    max_ms: float
    max_at: str
    last: int


@dataclass
class Report:
    """ok: nothing is wrong. clock: "monotonic" within one host, "wall" over several."""

    folder: str
    job_id: str = ""
    world_size: int = 0
    ranks: list[int] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    missing_journals: list[int] = field(default_factory=list)
    not_closed: list[int] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    stuck: list[StuckOperation] = field(default_factory=list)
    stuck_exchanges: list[StuckExchange] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    lags: list[Lag] = field(default_factory=list)
    clock: str = "monotonic"

    @property
    def ok(self) -> bool:
        """Whether there is anything to read and nothing wrong in it."""
        wrong = self.missing_journals or self.failures or self.stuck or self.mismatches
        return bool(self.ranks) and not wrong and not self.stuck_exchanges

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {"event": "comm_report", "ok": self.ok, **asdict(self)}


def examine(folder: Path) -> Report:
    """Reads the journals of `folder`; of several jobs, the one that started last.

    Raises:
        OSError: the directory cannot be read.
    """
    journals, skipped = read_directory(folder)
    report = Report(folder=str(folder), skipped=skipped)
    if not journals:
        return report
    newest = max(journals, key=lambda journal: journal.start_ns + journal.wall_offset_ns)
    report.job_id, report.world_size = newest.job_id, newest.world_size
    for journal in journals:
        if (journal.job_id, journal.world_size) != (newest.job_id, newest.world_size):
            skipped[f"rank-{journal.rank:05d}.journal"] = f"of another job, '{journal.job_id}'"
    ours = {journal.rank: journal for journal in journals if _file_name(journal) not in skipped}
    report.ranks = sorted(ours)
    report.missing_journals = [rank for rank in range(newest.world_size) if rank not in ours]
    report.not_closed = [rank for rank, journal in ours.items() if not journal.ended_ns]
    report.clock = "monotonic" if len({journal.boot_id for journal in ours.values()}) == 1 else "wall"
    for rank, journal in ours.items():
        for note in journal.notes:
            if note.kind == "failure":
                report.failures.setdefault(note.text, []).append(rank)
            else:
                stall = {"rank": rank, "seconds": note.duration_ns / 1e9, "text": note.text}
                report.stalls.append(stall)
    groups = _collect_groups(ours)
    for group in groups:
        mismatch = _find_mismatch(group, ours)
        if mismatch is not None:
            report.mismatches.append(mismatch)
        stuck = _find_stuck(group, ours)
        if stuck is not None:
            report.stuck.append(stuck)
        report.stuck_exchanges += find_stuck_exchanges(group.name, group.numbers, ours)
    report.lags = _measure_lags(groups, ours)
    return report


def _file_name(journal: Journal) -> str:
    return f"rank-{journal.rank:05d}.journal"


@dataclass
class _Group:
    """A group over the journals, by world rank.

    parts: its collectives, in the order of their sequence; numbers: of the group in the journal.
    """

    name: str
    size: int
    parts: dict[int, NDArray[Any]] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)


def _collect_groups(journals: dict[int, Journal]) -> list[_Group]:
    groups: dict[tuple[Any, ...], _Group] = {}
    for rank, journal in journals.items():
        alone = [number for number, name in enumerate(journal.names["operation"]) if name in _NOT_COLLECTIVE]
        collectives = journal.operations[~np.isin(journal.operations["operation"], alone)]
        for number, own in enumerate(journal.groups):
            if own.key is not None:
                mine = collectives[collectives["group"] == number]
                mine = mine[np.argsort(mine["sequence"], kind="stable")]
                group = groups.setdefault(own.key, _Group(own.name, own.size))
                group.parts[rank], group.numbers[rank] = mine, number
    return list(groups.values())


def _find_mismatch(group: _Group, journals: dict[int, Journal]) -> Mismatch | None:
    rows = [
        np.stack([part[name].astype(np.uint64) for name in ("sequence", *_FIELDS)], axis=1)
        for part in group.parts.values()
    ]
    different = np.unique(np.concatenate(rows), axis=0)[:, 0]
    repeated = different[1:][different[1:] == different[:-1]]
    if len(repeated) == 0:
        return None
    sequence = int(repeated[0])
    calls: dict[str, list[int]] = {}
    for rank, part in group.parts.items():
        for operation in part[part["sequence"] == sequence]:
            calls.setdefault(journals[rank].describe(operation), []).append(rank)
    return Mismatch(group.name, sequence, dict(sorted(calls.items(), key=lambda call: len(call[1]))))


def _find_stuck(group: _Group, journals: dict[int, Journal]) -> StuckOperation | None:
    parts = group.parts
    open_at: list[int] = []
    for rank, part in parts.items():
        unfinished = part[part["state"] != journals[rank].state("done")]
        open_at += unfinished["sequence"][:1].tolist()
    if not open_at:
        return None
    sequence = min(open_at)
    arrived = {rank: part[part["sequence"] == sequence] for rank, part in parts.items()}
    passed = {rank for rank, part in parts.items() if len(part) and int(part["sequence"][-1]) > sequence}
    missing = [rank for rank, found in arrived.items() if len(found) == 0 and rank not in passed]
    waiting = {
        rank: _waited_s(found[0], journals[rank])
        for rank, found in arrived.items()
        if len(found) and found[0]["state"] != journals[rank].state("done")
    }
    witness = next(rank for rank, found in arrived.items() if len(found))
    call = arrived[witness][0]
    return StuckOperation(
        group=group.name,
        members=list(parts),
        sequence=sequence,
        operation=journals[witness].describe(call),
        label=clean(call["label"]),
        missing={rank: _last_and_next(journals[rank]) for rank in missing},
        waiting=waiting,
        unknown=max(0, group.size - len(parts)),
    )


def _waited_s(operation: Any, journal: Journal) -> float | None:
    start = int(operation["started_ns"]) or int(operation["enqueued_ns"])
    end = int(operation["ended_ns"]) or journal.ended_ns or journal.heard_ns
    return round((end - start) / 1e9, 3) if end > start else None


def _last_and_next(journal: Journal) -> dict[str, str]:
    """What a rank ended last, and what it has posted since, in all its groups."""
    done = journal.operations["state"] == journal.state("done")
    result = {"last": "nothing", "next": "nothing"}
    for name, chosen in (("last", np.flatnonzero(done)[-1:]), ("next", np.flatnonzero(~done)[:1])):
        for index in chosen:
            operation = journal.operations[index]
            group = journal.groups[int(operation["group"])].name
            result[name] = f"{journal.describe(operation)}, group '{group}', sequence {operation['sequence']}"
            if operation["label"]:
                result[name] += f", label '{clean(operation['label'])}'"
    return result


def _measure_lags(groups: list[_Group], journals: dict[int, Journal]) -> list[Lag]:
    """Over operations at which all members with a journal arrived; the slowest rank first."""
    one_host = len({journal.boot_id for journal in journals.values()}) == 1
    lags: dict[int, list[NDArray[Any]]] = {rank: [] for rank in journals}
    last = dict.fromkeys(journals, 0)
    worst = dict.fromkeys(journals, (-1, ""))
    for group in groups:
        started = {rank: part[part["started_ns"] > 0] for rank, part in group.parts.items()}
        common: NDArray[Any] | None = None
        for part in started.values():
            found = np.unique(part["sequence"])
            common = found if common is None else np.intersect1d(common, found)
        if len(started) < 2 or common is None or len(common) == 0:
            continue
        times = []
        for rank, part in started.items():
            first_of = part["started_ns"][np.searchsorted(part["sequence"], common)]
            times.append(first_of + (0 if one_host else journals[rank].wall_offset_ns))
        late = np.stack(times) - np.min(times, axis=0)
        for row, rank in enumerate(started):
            lags[rank].append(late[row])
            last[rank] += int((np.argmax(late, axis=0) == row).sum())
            at = int(np.argmax(late[row]))
            worst[rank] = max(
                worst[rank], (int(late[row][at]), f"group '{group.name}', sequence {common[at]}")
            )
    result = [
        Lag(
            rank=rank,
            operations=sum(map(len, parts_of_rank)),
            median_ms=round(float(np.median(np.concatenate(parts_of_rank))) / 1e6, 3),
            max_ms=round(worst[rank][0] / 1e6, 3),
            max_at=worst[rank][1],
            last=last[rank],
        )
        for rank, parts_of_rank in lags.items()
        if parts_of_rank
    ]
    return sorted(result, key=lambda lag: (-lag.median_ms, -lag.max_ms))


# ---- for people ----


def ranks_text(ranks: list[int]) -> str:
    """As in "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


def render(report: Report) -> list[str]:
    """The report as lines."""
    lines = [f"{report.folder}: journals of {len(report.ranks)} of {report.world_size} ranks"]
    if report.job_id:
        lines[0] += f", job {report.job_id}"
    lines += [f"skipped {name}: {why}" for name, why in report.skipped.items()]
    if not report.ranks:
        return [*lines, "VERDICT: there is no journal to read"]
    lines.append("nothing is wrong" if report.ok else "VERDICT")
    if report.missing_journals:
        lines.append(f"  no journal of {ranks_text(report.missing_journals)}")
    for text, ranks in report.failures.items():
        lines.append(f"  failure, as told to {ranks_text(ranks)}: {text}")
    for mismatch in report.mismatches:
        calls = "; ".join(f"{ranks_text(ranks)}: {call}" for call, ranks in mismatch.calls.items())
        lines.append(f"  group '{mismatch.group}', sequence {mismatch.sequence}: the calls differ: {calls}")
    for stuck in report.stuck:
        lines += _render_stuck(stuck)
    lines += _render_exchanges(report.stuck_exchanges)
    if report.not_closed:
        lines.append(f"not closed (killed, or still running): {ranks_text(report.not_closed)}")
    for stall in report.stalls:
        lines.append(f"stall of {stall['seconds']:.1f} s: {stall['text']}")
    return lines + _render_lags(report)


def _render_stuck(stuck: StuckOperation) -> list[str]:
    label = f", label '{stuck.label}'" if stuck.label else ""
    where = f"group '{stuck.group}' ({ranks_text(stuck.members)}), sequence {stuck.sequence}{label}"
    if stuck.missing:
        lines = [f"  {where}: {ranks_text(list(stuck.missing))} never arrived at {stuck.operation}"]
    else:
        lines = [f"  {where}: {stuck.operation} did not end"]
    for rank, did in stuck.missing.items():
        lines.append(f"    rank {rank} last ended {did['last']}; posted next: {did['next']}")
    if stuck.unknown:
        lines.append(f"    not known, for want of a journal: {stuck.unknown} of its ranks")
    for rank, seconds in stuck.waiting.items():
        how_long = "for an unknown time" if seconds is None else f"{seconds:.1f} s"
        lines.append(f"    rank {rank} waited {how_long}")
    return lines


def _render_exchanges(stuck: list[StuckExchange]) -> list[str]:
    lines = []
    circles = set()
    for each in stuck:
        label = f", label '{each.label}'" if each.label else ""
        line = f"  group '{each.group}', rank {each.rank}, sequence {each.sequence}{label}: {each.operation}"
        missing = ", ".join(f"rank {rank} has not posted {what}" for rank, what in each.waits_for.items())
        lines.append(f"{line}: {missing or 'did not end'}")
        if each.circle:
            circles.add((each.group, tuple(sorted(each.circle))))
    for group, ranks in sorted(circles):
        lines.append(
            f"  group '{group}': {ranks_text(list(ranks))} wait for each other; put sends and receives that depend on"
            " each other into one exchange"
        )
    return lines


def _render_lags(report: Report) -> list[str]:
    if not report.lags:
        return []
    lines = ["arrival after the first rank, slowest ranks first"]
    if report.clock == "wall":
        lines[0] += " (several hosts: compared by their wall clocks, whose differences count as lag)"
    for lag in report.lags[:8]:
        lines.append(
            f"  rank {lag.rank}: median {lag.median_ms:.3f} ms, max {lag.max_ms:.3f} ms ({lag.max_at}),"
            f" last in {lag.last} of {lag.operations}"
        )
    if len(report.lags) > 8:
        lines.append(f"  and {len(report.lags) - 8} more; --json has all")
    return lines
