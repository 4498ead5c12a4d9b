"""Decides when the ranks of a launch get which signal, and who is to blame. Pure.

Words used here: a rank *ends* with a code, the exit status or minus the signal's number. The
launch *fails* with the first rank that ends with a code other than 0 of its own accord. From
then on others are told to end (SIGTERM), then killed. A *stop* is an end that the user asked
for by SIGINT or SIGTERM: ranks have `grace_s` to finish what they are doing.

Times are seconds of a monotonic clock; the caller passes them in.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .config import LaunchConfig

# After the first failure, so that ranks that die of the same cause show their own end.
_SETTLE_S = 0.02
# Two ends closer than this have no order that could be told from outside.
_SIMULTANEOUS_S = 0.01
# A killed process that is still there hangs inside the kernel; waiting longer does not help.
_ABANDON_S = 5.0
_STRAGGLER_NOTICE_S = 30.0

FINISHED = "finished"  # code 0
CAUSE = "cause"  # the first failure, or within _SIMULTANEOUS_S of it
ALSO_FAILED = "also_failed"  # later, but not by the launcher's signals
CONSEQUENCE = "consequence"  # ended because the launcher told it to
STOPPED = "stopped"  # ended after the user asked for a stop
EARLY_EXIT = "early_exit"  # code 0 while others went on, and exit_grace_s has passed
ABANDONED = "abandoned"  # did not even end by SIGKILL


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    code: None for an abandoned rank. at: seconds since the start of the launch.
    """

    rank: int
    code: int | None
    at: float
    role: str


class Supervisor:
    """State of one launch. Feed it ends and signals; send what `due` returns to living ranks.

    SIGKILL in an answer means the whole process group of a rank, any other signal the rank
    alone: its loader workers must outlive a graceful stop.
    """

    def __init__(self, config: LaunchConfig, *, start: float) -> None:
        self._config = config
        self._start = start
        self._alive = set(range(config.num_ranks))
        self._schedule: dict[int, float] = {}  # signal -> when to send it to all living ranks
        self._sent: dict[int, float] = {}  # signal -> when the launcher first sent it
        self._abandon_at: float | None = None
        self._first_failure_at: float | None = None
        self._first_finish_at: float | None = None
        self._noticed_stragglers = False
        self.stop_signal: int | None = None
        self.ends: list[RankEnd] = []

    @property
    def done(self) -> bool:
        """No rank is left to wait for."""
        return not self._alive

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(sorted(self._alive))

    @property
    def killed(self) -> bool:
        """SIGKILL has been sent to whoever was left."""
        return signal.SIGKILL in self._sent

    def forwarded(self, number: int) -> bool:
        """The launcher has sent this signal to the ranks."""
        return number in self._sent

    def on_ends(self, codes: Sequence[tuple[int, int]], now: float) -> None:
        """(rank, code) of ranks found ended at the same moment.

        Their order is unknown, so those killed by a signal come first: they are the likelier
        cause of the errors of others.
        """
        for rank, code in sorted(codes, key=lambda end: (end[1] >= 0, end[1] == 0, end[0])):
            self._alive.discard(rank)
            self.ends.append(self._end(rank, code, now, self._role(code, now)))
            if code == 0 and self._first_finish_at is None:
                self._first_finish_at = now

    def on_signal(self, number: int, now: float) -> None:
        """A signal for the launcher, to be passed on."""
        self._schedule[number] = now
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        if self.stop_signal is not None:
            if number == signal.SIGINT:
                self._schedule[signal.SIGKILL] = now
            return
        self.stop_signal = number
        kill_at = now + self._config.grace_s
        self._schedule.setdefault(signal.SIGKILL, kill_at)

    def due(self, now: float) -> list[int]:
        """Signals to send to all living ranks now."""
        self._check_early_exit(now)
        numbers = sorted(n for n, at in self._schedule.items() if at <= now)
        for number in numbers:
            del self._schedule[number]
            self._sent.setdefault(number, now)
            if number == signal.SIGKILL and self._abandon_at is None:
                self._abandon_at = now + _ABANDON_S
        if self._abandon_at is not None and now >= self._abandon_at:
            for rank in self.alive:
                self.ends.append(self._end(rank, None, now, ABANDONED))
            self._alive.clear()
        return numbers

    def stragglers(self, now: float) -> tuple[int, ...]:
        """Ranks that still run long after another has exited 0; answered once per launch."""
        if self._noticed_stragglers or self._first_finish_at is None or self._closing():
            return ()
        if now < self._first_finish_at + _STRAGGLER_NOTICE_S:
            return ()
        self._noticed_stragglers = True
        return self.alive

    def deadline(self) -> float | None:
        """When `due` or `stragglers` must be asked again, at the latest."""
        times = list(self._schedule.values())
        if self._abandon_at is not None:
            times.append(self._abandon_at)
        if self._first_finish_at is not None and not self._closing():
            if not self._noticed_stragglers:
                times.append(self._first_finish_at + _STRAGGLER_NOTICE_S)
            if self._config.exit_grace_s is not None:
                times.append(self._first_finish_at + self._config.exit_grace_s)
        return min(times) if times else None

    def exit_code(self) -> int:
        """0 if all ranks exited 0; else the first failed rank's status, or 128 + its signal."""
        for end in self.ends:
            if end.role == EARLY_EXIT:
                return 1
            if end.code == 0:
                continue
            told = end.role in (CONSEQUENCE, STOPPED)
            if end.code is None or (told and self.killed and end.code == -signal.SIGKILL):
                # The launcher killed it: the reason is the stop, if there was one.
                return 128 + (self.stop_signal or signal.SIGKILL)
            return end.code if end.code > 0 else 128 - end.code
        return 0

    def _closing(self) -> bool:
        return self._first_failure_at is not None or self.stop_signal is not None

    def _end(self, rank: int, code: int | None, now: float, role: str) -> RankEnd:
        return RankEnd(rank=rank, code=code, at=now - self._start, role=role)

    def _role(self, code: int, now: float) -> str:
        if self._first_failure_at is not None:
            told = signal.SIGTERM in self._sent or self.stop_signal is not None
            ours = code >= 0 or -code in self._sent
            if told and ours:
                return CONSEQUENCE
            if now - self._first_failure_at <= _SIMULTANEOUS_S and code != 0:
                return CAUSE
            return FINISHED if code == 0 else ALSO_FAILED
        if code == 0:
            return FINISHED
        if self.stop_signal is not None:
            return STOPPED
        self._fail(now)
        return CAUSE

    def _fail(self, now: float) -> None:
        self._first_failure_at = now
        term_at = now + max(_SETTLE_S, self._config.survivor_grace_s)
        self._schedule.setdefault(signal.SIGTERM, term_at)
        self._schedule.setdefault(signal.SIGKILL, term_at + self._config.kill_after_s)

    def _check_early_exit(self, now: float) -> None:
        grace = self._config.exit_grace_s
        if grace is None or self._first_finish_at is None or self._closing() or self.done:
            return
        if now < self._first_finish_at + grace:
            return
        first = self.ends[0]
        self.ends[0] = RankEnd(rank=first.rank, code=first.code, at=first.at, role=EARLY_EXIT)
        self._fail(now)
        self._schedule[signal.SIGTERM] = now
