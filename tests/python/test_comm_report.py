"""The offline verdict, on journals that are made here. test_watch.py has those of real ranks."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
from helpers import polyreme
from polyreme import journal as layout
from polyreme.comm_report import examine, ranks_text, render
from polyreme.journal import JournalError, read_journal

ENQUEUED, RUNNING, DONE, FAILED = 1, 2, 3, 4
NAMES = {
    "operation_names": ["nothing", "attach", "all_reduce", "broadcast", "barrier", "exchange"],
    "dtype_names": ["float32", "float64"],
    "reduction_names": ["sum", "max"],
    "state_names": ["nothing", "enqueued", "running", "done", "failed"],
}
ALL_REDUCE, BROADCAST, BARRIER, EXCHANGE = 2, 3, 4, 5
MS = 1_000_000
START = 1_000_000 * MS


class Written:
    """A journal in the making; `to_bytes` is the file."""

    def __init__(self, rank, world_size=4, *, slots=64, host="a", groups=(), ended=True):
        self.head = np.zeros((), layout._HEADER)
        sizes = {"max_groups": 4, "max_events": 4, "num_slots": slots}
        fixed = {"magic": b"PLYJRNL\n", "version": layout._VERSION, "header_bytes": 4096, "group_bytes": 96}
        more = {"event_bytes": 512, "operation_bytes": 128, "pid": 100 + rank, "start_ns": START}
        who = {"rank": rank, "world_size": world_size, "host": host, "boot_id": host, "job_id": "job"}
        for name, value in {**sizes, **fixed, **more, **who}.items():
            self.head[name] = value
        for name, values in NAMES.items():
            self.head[name][: len(values)] = values
        self.head["ended_ns"] = START + 10_000 * MS if ended else 0
        self.head["heard_ns"] = START + 9_000 * MS
        self.groups = np.zeros(4, layout._GROUP)
        self.events = np.zeros(4, layout._EVENT)
        self.ring = np.zeros(slots, layout._OPERATION)
        self.groups[0] = ("world", rank, world_size, layout._NO_PARENT, 0, 0, 1, 0)
        for number, (name, ranks, split_sequence) in enumerate(groups, start=1):
            self.groups[number] = (name, ranks.index(rank), len(ranks), 0, ranks[0], split_sequence, 1, 0)
        self.head["num_groups"] = 1 + len(groups)

    def add(
        self,
        sequence,
        *,
        operation=ALL_REDUCE,
        count=4,
        state=DONE,
        at_ms=0.0,
        group=0,
        label="",
        root=-1,
        counts_hash=0,
        sends=(),
        receives=(),
    ):
        """An operation that started at START + at_ms, and took 1 ms if it ended."""
        ticket = int(self.head["num_operations"])
        self.head["num_operations"] += 1
        start = START + int(at_ms * MS)
        row = self.ring[ticket % len(self.ring)]
        values = {"mark": 2 * ticket + 2, "sequence": sequence, "count": count, "group": group, "root": root}
        values |= {"enqueued_ns": start, "started_ns": start if state != ENQUEUED else 0, "label": label}
        values |= {"ended_ns": start + MS if state >= DONE else 0, "operation": operation, "state": state}
        parts = [*sends, *(~peer for peer in receives)]
        values |= {"counts_hash": counts_hash, "num_parts": len(parts)}
        for name, value in values.items():
            row[name] = value
        row["parts"][: len(parts)] = parts[:4]
        return self

    def exchange(self, sequence, state=DONE, *, sends=(), receives=(), **options):
        """With these peers; count is what is sent."""
        return self.add(sequence, operation=EXCHANGE, state=state, sends=sends, receives=receives, **options)

    def note(self, kind, text, duration_ms=0):
        number = int(self.head["num_events"])
        self.events[number] = (kind, 0, START, duration_ms * MS, text)
        self.head["num_events"] += 1
        return self

    def to_bytes(self):
        head = self.head.tobytes()
        parts = (self.groups, self.events, self.ring)
        return head + bytes(4096 - len(head)) + b"".join(part.tobytes() for part in parts)

    def save(self, folder):
        (folder / f"rank-{int(self.head['rank']):05d}.journal").write_bytes(self.to_bytes())


def good(rank, operations=10, **options):
    written = Written(rank, **options)
    for n in range(1, operations + 1):
        written.add(n, at_ms=n + 0.1 * rank)
    return written


def test_nothing_is_wrong(tmp_path):
    for rank in range(4):
        good(rank).save(tmp_path)
    report = examine(tmp_path)
    assert report.ok
    assert report.ranks == [0, 1, 2, 3]
    assert not report.not_closed
    assert "nothing is wrong" in render(report)
    done = polyreme("comm-report", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_f38_a_rank_that_skipped_one_operation(tmp_path):
    for rank in (0, 1, 3):
        good(rank).add(11, state=FAILED, at_ms=20, label="layer 3").save(tmp_path)
    good(2, groups=[("pair", [1, 2], 3)]).add(1, group=1, state=RUNNING, operation=BARRIER).save(tmp_path)
    report = examine(tmp_path)
    first = next(stuck for stuck in report.stuck if stuck.group == "world")
    assert (first.sequence, first.operation, first.label) == (11, "all_reduce float32[4] sum", "layer 3")
    assert first.missing == {
        2: {
            "last": "all_reduce float32[4] sum, group 'world', sequence 10",
            "next": "barrier, group 'pair', sequence 1",
        }
    }
    assert first.waiting == {0: 0.001, 1: 0.001, 3: 0.001}
    done = polyreme("comm-report", tmp_path)
    assert done.returncode == 1
    assert "rank 2 never arrived at all_reduce float32[4] sum" in done.stdout
    assert "posted next: barrier, group 'pair', sequence 1" in done.stdout


def test_ranks_that_wait_wait_until_the_watch_last_ran(tmp_path):
    for rank in range(2):
        written = good(rank, world_size=2, ended=False)
        if rank == 0:
            written.add(11, state=RUNNING, at_ms=4000)
        written.save(tmp_path)
    report = examine(tmp_path)
    assert report.stuck[0].waiting == {0: 5.0}
    assert report.not_closed == [0, 1]


def test_f34_calls_that_differ(tmp_path):
    for rank in range(4):
        operation = {"operation": BROADCAST, "root": 0} if rank == 1 else {}
        good(rank).add(11, state=FAILED, **operation).save(tmp_path)
    (mismatch,) = examine(tmp_path).mismatches
    assert mismatch.sequence == 11
    assert mismatch.calls == {
        "broadcast float32[4] root 0": [1],
        "all_reduce float32[4] sum": [0, 2, 3],
    }
    assert "rank 1: broadcast float32[4] root 0; ranks 0, 2-3: all_reduce" in "\n".join(
        render(examine(tmp_path))
    )


def test_uneven_counts_that_differ(tmp_path):
    for rank in range(3):
        good(rank, world_size=3).add(11, state=FAILED, counts_hash=0xAB if rank else 2**64 - 1).save(tmp_path)
    (mismatch,) = examine(tmp_path).mismatches
    assert mismatch.calls == {
        "all_reduce float32[4] uneven (counts ffffffffffffffff) sum": [0],
        "all_reduce float32[4] uneven (counts ab) sum": [1, 2],
    }


def test_two_ranks_that_both_send_first(tmp_path):
    for rank in range(4):
        written = good(rank)
        if rank in (1, 2):
            peer = 3 - rank
            written.exchange(1, sends=[peer], receives=[peer])
            written.exchange(2, FAILED, sends=[peer], label="halo")
        written.save(tmp_path)
    report = examine(tmp_path)
    assert not report.ok
    assert not report.stuck
    first, second = report.stuck_exchanges
    assert (first.rank, first.sequence, first.label) == (1, 2, "halo")
    assert (first.waits_for, first.circle) == ({2: "a receive"}, [1, 2])
    assert (second.waits_for, second.circle) == ({1: "a receive"}, [2, 1])
    text = "\n".join(render(report))
    assert (
        "rank 1, sequence 2, label 'halo': exchange that sends to rank 2: rank 2 has not posted a receive"
        in text
    )
    assert "ranks 1-2 wait for each other" in text


def test_a_circle_of_exchanges_and_who_waits_behind_it(tmp_path):
    ring = {0: 1, 1: 2, 2: 0}
    for rank in range(4):
        written = good(rank)
        if rank in ring:
            written.exchange(1, RUNNING, receives=[ring[rank]])
        else:
            written.exchange(1, RUNNING, sends=[0], receives=[1])
        written.save(tmp_path)
    stuck = {each.rank: each for each in examine(tmp_path).stuck_exchanges}
    assert stuck[0].circle == [0, 1, 2]
    assert stuck[3].circle == []
    assert stuck[3].waits_for == {0: "a receive", 1: "a send"}
    assert stuck[1].waits_for == {2: "a send"}


# The second tensor from 0 to 1: rank 1 has received one, and posts no other.
def test_exchanges_are_matched_by_their_order_in_places_of_the_group(tmp_path):
    group = [("pair", [1, 3], 5)]
    good(1, groups=group).exchange(1, sends=[1, 1, 1], group=1).exchange(2, RUNNING, sends=[1], group=1).save(
        tmp_path
    )
    good(3, groups=group).exchange(1, receives=[0], group=1).exchange(2, receives=[0, 0], group=1).save(
        tmp_path
    )
    for rank in (0, 2):
        good(rank).save(tmp_path)
    (stuck,) = examine(tmp_path).stuck_exchanges
    assert (stuck.group, stuck.rank, stuck.waits_for) == ("pair", 1, {3: "a receive"})
    assert stuck.operation == "exchange that sends to rank 3"


def test_an_exchange_whose_peer_came_but_did_not_end_either(tmp_path):
    good(0, world_size=2).exchange(1, RUNNING, sends=[1] * 6).save(tmp_path)
    good(1, world_size=2).exchange(1, RUNNING, receives=[0] * 6).save(tmp_path)
    report = examine(tmp_path)
    assert [each.waits_for for each in report.stuck_exchanges] == [{}, {}]
    assert any("and 2 more: did not end" in line for line in render(report))


def test_a_journal_that_is_missing(tmp_path):
    for rank in (0, 2):
        good(rank, world_size=3).add(11, state=FAILED).save(tmp_path)
    report = examine(tmp_path)
    assert report.missing_journals == [1]
    assert report.stuck[0].unknown == 1
    assert report.stuck[0].missing == {}
    assert not report.ok


def test_failures_are_told_once_and_stalls_are_no_verdict(tmp_path):
    for rank in range(4):
        good(rank).note(1, f"rank {rank} was silent", 1600).save(tmp_path)
    report = examine(tmp_path)
    assert report.ok
    assert [stall["seconds"] for stall in report.stalls] == [1.6] * 4
    for rank in range(4):
        good(rank).note(2, "lost rank 2").save(tmp_path)
    report = examine(tmp_path)
    assert report.failures == {"lost rank 2": [0, 1, 2, 3]}
    assert not report.ok


def test_stragglers(tmp_path):
    for rank in range(4):
        written = Written(rank)
        for n in range(1, 102):
            late = 5 if rank == 3 else 0.01 * rank
            late = 80 if (rank, n) == (1, 50) else late
            written.add(n, at_ms=100 * n + late)
        written.save(tmp_path)
    lags = {lag.rank: lag for lag in examine(tmp_path).lags}
    assert next(iter(lags)) == 3  # the slowest is first
    assert lags[3].median_ms == 5
    assert lags[3].operations == 64  # the ring wrapped
    assert (lags[3].last, lags[1].last) == (63, 1)
    assert (lags[1].max_ms, lags[1].max_at) == (80, "group 'world', sequence 50")


def test_groups_of_one_name_are_told_apart_by_their_split(tmp_path):
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        written = good(rank, groups=[("dp", pair, 5), ("dp", pair, 6)])
        written.add(1, group=1, count=pair[0])
        if rank != 3:
            written.add(1, group=2, count=9)
        written.save(tmp_path)
    assert examine(tmp_path).ok


def test_exchanges_are_not_compared(tmp_path):
    for rank in range(4):
        good(rank).add(11, operation=EXCHANGE, count=rank).save(tmp_path)
    assert examine(tmp_path).ok


def test_clocks_of_several_hosts(tmp_path):
    for rank in range(2):
        written = good(rank, world_size=2, host="ab"[rank])
        written.head["wall_offset_ns"] = rank * 1000 * MS
        written.save(tmp_path)
    report = examine(tmp_path)
    assert report.clock == "wall"
    assert report.lags[0].median_ms == pytest.approx(1000.1)
    assert any("wall clocks" in line for line in render(report))


def test_an_older_job_in_the_same_directory(tmp_path):
    for rank in range(4):
        written = good(rank, world_size=4 if rank > 1 else 2)
        if rank < 2:
            written.head["job_id"] = "second"
            written.head["start_ns"] += MS
        written.save(tmp_path)
    report = examine(tmp_path)
    assert (report.job_id, report.ranks, report.ok) == ("second", [0, 1], True)
    assert list(report.skipped) == ["rank-00002.journal", "rank-00003.journal"]


# ---- files that are no journals ----


def test_foreign_files_are_skipped_and_told(tmp_path):
    good(0, world_size=1).save(tmp_path)
    whole = good(1).to_bytes()
    (tmp_path / "rank-00001.journal").write_bytes(whole[:-1])
    (tmp_path / "rank-00002.journal").write_bytes(b"")
    (tmp_path / "rank-00003.journal").write_bytes(b"#!/bin/sh\n" * 2000)
    (tmp_path / "rank-00004.journal").symlink_to(tmp_path / "rank-00000.journal")
    os.mkfifo(tmp_path / "rank-00005.journal")
    (tmp_path / "rank-00006.journal").mkdir()
    (tmp_path / "rank-00007.journal").write_bytes(good(0, world_size=1).to_bytes())
    (tmp_path / "notes.txt").write_text("not named like a journal")
    report = examine(tmp_path)
    assert report.ranks == [0]
    assert sorted(report.skipped) == [f"rank-0000{n}.journal" for n in range(1, 8)]
    assert "its header says" in report.skipped["rank-00001.journal"]
    assert "its content says rank-00000.journal" in report.skipped["rank-00007.journal"]
    assert report.ok


def test_sizes_are_capped_before_memory_is_taken(tmp_path):
    path = tmp_path / "rank-00000.journal"
    for name in ("num_slots", "max_groups", "max_events", "header_bytes"):
        written = good(0)
        written.head[name] = 0xFFFFFFFF
        path.write_bytes(written.to_bytes())
        with pytest.raises(JournalError, match=name):
            read_journal(path)
    written = good(0)
    written.head["version"] = layout._VERSION + 1
    path.write_bytes(written.to_bytes())
    with pytest.raises(JournalError, match=f"version {layout._VERSION + 1}"):
        read_journal(path)


def test_half_written_operations_are_left_out(tmp_path):
    written = good(0, world_size=1)
    written.ring[9]["mark"] = 19
    written.ring[4]["mark"] = 0xFFFFFFFFFFFFFFFE
    written.save(tmp_path)
    found = read_journal(tmp_path / "rank-00000.journal")
    assert found.operations["sequence"].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert found.num_broken == 2


def test_text_is_harmless_to_a_terminal(tmp_path):
    written = good(0, world_size=1, host="\x1b[2J")
    written.add(11, state=FAILED, label="\x1b]0;x\x07").note(2, "a\nb")
    written.save(tmp_path)
    text = "".join(render(examine(tmp_path)))
    assert "\x1b" not in text
    assert "a?b" in text


def test_fuzzed_journals_are_read_or_refused(tmp_path):
    """Whatever the bytes are: a report or a JournalError."""
    source = random.Random(5)
    whole = good(1, groups=[("pair", [1, 3], 4)]).note(2, "x").to_bytes()
    for rank in (0, 2, 3):
        good(rank).save(tmp_path)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        data = bytearray(whole)
        end = source.choice([1300, 4096 + 96 * 4, len(data)])  # mostly where sizes and indices are
        for _ in range(source.randint(1, 8)):
            at = source.randrange(end)
            data[at : at + 4] = source.choice([b"\xff" * 4, b"\0" * 4, source.randbytes(4)])
        if source.random() < 0.1:
            del data[source.randrange(len(data)) :]
        (tmp_path / "rank-00001.journal").write_bytes(data)
        report = examine(tmp_path)
        render(report)
        json.dumps(report.as_json())
        outcomes["rank-00001.journal" in report.skipped] += 1
    assert min(outcomes.values()) > 20


def test_an_empty_directory_and_none(tmp_path):
    done = polyreme("comm-report", tmp_path)
    assert done.returncode == 1
    assert "no journal" in done.stdout
    done = polyreme("comm-report", tmp_path / "none")
    assert done.returncode == 2
    assert "No such file" in done.stderr


def test_ranks_text():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"
