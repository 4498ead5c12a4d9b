"""A local launch from start to report: ranks are started, watched, ended together, and maybe started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import deque
from dataclasses import replace

from ..environment import memory_segment
from . import cgroup, env
from .config import LaunchConfig, LaunchError
from .loop import FORWARDED, EventLoop
from .process import Guard, RankProcess, rank_command
from .report import LaunchResult, RankFacts, as_json, as_text
from .sink import Sink, TerminalSink
from .streams import RankLog, RankStream, copy_window_size, new_tail, open_terminal
from .supervisor import Supervisor
from .system import listen, remove_segments, write_whole

_PATIENCE_S = 1.0  # with a reader that has stood still before
_LOST_SIGNAL_POLL_S = 1.0  # in case the notice of a child's end gets lost


def launch(config: LaunchConfig) -> int:
    """Runs the launch to its end and returns the exit code. Call it from the main thread.

    Raises LaunchError if it cannot start; no rank is left behind then.
    """
    found = env.foreign_launch(os.environ)
    if found and not config.nested:
        raise LaunchError(
            f"another launcher has already made this process a rank ({', '.join(found)}); start"
            " the script itself under that launcher, unset these variables, or pass --nested to"
            " start an independent job from here"
        )
    launcher = _Launcher(config)
    try:
        with launcher.loop.signals():
            try:
                launcher.start()
                return launcher.run()
            finally:
                launcher.end_all()
    finally:
        launcher.loop.close()


class _Launcher:
    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._launch_id = os.urandom(8).hex()
        self._logs: dict[int, RankLog] = {}
        self._guard: Guard | None = None
        self._memory = ""  # what outlives a restart
        self._restarts = 0
        self.loop = EventLoop(self._on_signal)
        self._reset()

    def _reset(self) -> None:
        """What belongs to one start of the ranks."""
        # Ranks of an earlier start are not of this job.
        self._job_id = f"{self._launch_id}-{self._restarts}" if self._restarts else self._launch_id
        self._started_at = time.monotonic()
        self._supervisor = Supervisor(self._config, start=self._started_at)
        self._processes: dict[int, RankProcess] = {}
        self._streams: dict[int, list[RankStream]] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._facts: dict[int, RankFacts] = {}
        self._check_children_at = 0.0
        self._oom_kills = cgroup.oom_kills()
        self._terminal: tuple[Sink, int] | None = None  # the real one, and rank 0's

    # --- start ---

    def start(self) -> None:
        """Starts all ranks, or raises LaunchError; `end_all` then ends those already started."""
        config = self._config
        if config.log_dir is not None:
            self._open_logs(config.log_dir)
        self._guard = Guard(self._segment_prefix)
        if config.restarts:
            try:
                self._memory = memory_segment.create(self._launch_id, os.getpid())
            except OSError as error:
                self._say(f"nothing will be kept in memory between restarts: {error}")
        self._start_ranks()

    def _start_ranks(self) -> None:
        config = self._config
        with listen(config.port, config.num_ranks) as store:
            cpus, quota = env.usable_cpus()
            plan = env.plan_cpus(cpus, config.num_ranks, quota=quota, bind=config.bind)
            job = env.JobSettings(
                num_ranks=config.num_ranks,
                port=store.getsockname()[1],
                job_id=self._job_id,
                secret=os.urandom(32).hex(),
                num_threads=plan.num_threads,
                restart=self._restarts,
                memory=self._memory,
            )
            for rank in range(config.num_ranks):
                binding = None if plan.bindings is None else plan.bindings[rank]
                self._start_rank(rank, job, binding, store.fileno() if rank == 0 else None)

    @property
    def _segment_prefix(self) -> str:
        return f"polyreme-{self._launch_id}-"

    def _open_logs(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            for rank in range(self._config.num_ranks):
                path = os.path.join(folder, f"rank-{rank}.log")
                self._logs[rank] = RankLog(path, self._say)
        except OSError as error:
            raise LaunchError(f"cannot write logs: {error}; check --log-dir") from error

    def _start_rank(
        self,
        rank: int,
        job: env.JobSettings,
        cpus: tuple[int, ...] | None,
        store_fd: int | None,
    ) -> None:
        self._tails[rank] = new_tail()
        self._streams[rank] = []
        with contextlib.ExitStack() as theirs:
            stdin = None  # rank 0 inherits ours, for a debugger
            if rank != 0:
                stdin = theirs.enter_context(open(os.devnull, "rb")).fileno()
            stdout, stderr = self._open_streams(rank, theirs)
            process = RankProcess(
                rank_command(self._config),
                env.rank_environment(os.environ, job, rank=rank, store_fd=store_fd),
                rank=rank,
                cpus=cpus,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=() if store_fd is None else (store_fd,),
            )
        self._processes[rank] = process
        self._facts[rank] = RankFacts(pid=process.pid)
        assert self._guard is not None
        self._guard.watch(process.pid)

    def _open_streams(self, rank: int, theirs: contextlib.ExitStack) -> tuple[int, int]:
        """Opens the streams of a rank; returns its ends, which `theirs` closes after the start.

        Rank 0 sees a terminal where the launcher has one, so that it can draw its progress line.
        """
        ends: list[int] = []
        terminal: int | None = None
        for sink, tail in ((self.loop.stdout, None), (self.loop.stderr, self._tails[rank])):
            is_terminal = rank == 0 and isinstance(sink, TerminalSink)
            if not is_terminal or self._config.prefix == "always":
                ours, end = os.pipe()
                theirs.callback(os.close, end)
                self._add_stream(ours, rank, sink, False, tail)
                ends.append(end)
                continue
            if terminal is None:
                ours, terminal = open_terminal(sink.fd)
                theirs.callback(os.close, terminal)
                self._terminal = (sink, ours)
                self._add_stream(ours, rank, sink, True, self._tails[rank])
            ends.append(terminal)
        return ends[0], ends[1]

    def _add_stream(
        self, fd: int, rank: int, sink: Sink, is_terminal: bool, tail: deque[bytes] | None
    ) -> None:
        stream = RankStream(
            fd,
            rank=rank,
            num_ranks=self._config.num_ranks,
            prefix=self._config.prefix,
            sink=sink,
            is_terminal=is_terminal,
            log=self._logs.get(rank),
            tail=tail,
        )
        self._streams[rank].append(stream)
        self.loop.add_stream(stream)

    # --- run ---

    def run(self) -> int:
        """Loops until all ranks have ended for good and their output is out; returns the exit code."""
        self._watch()
        while self._may_restart():
            for text in as_text(self._result(())):
                self._say(text)
            remove_segments(self._segment_prefix, keep=self._memory)
            self._restarts += 1
            self._say(f"restart {self._restarts} of {self._config.restarts}")
            self._reset()
            self._start_ranks()
            self._watch()
        return self._finish()

    def _may_restart(self) -> bool:
        stopped = self._supervisor.stop_signal is not None
        abandoned = any(end.code is None for end in self._supervisor.ends)  # it holds memory and ports
        failed = self._supervisor.exit_code() != 0 and not stopped and not abandoned
        return failed and self._restarts < self._config.restarts

    def _watch(self) -> None:
        """Loops until all ranks have ended."""
        while not self._supervisor.done:
            self.loop.turn(self._next_check() - time.monotonic())
            now = time.monotonic()
            if now >= self._check_children_at:
                self._collect_ended(now)
            for number in self._supervisor.due(now):
                for rank in self._supervisor.alive:
                    self._processes[rank].send(number)
            stragglers = self._supervisor.stragglers(now)
            if stragglers:
                names = ", ".join(str(rank) for rank in stragglers)
                self._say(f"a rank exited with code 0 a while ago, but still running: {names}")

    def _next_check(self) -> float:
        deadline = self._supervisor.deadline()
        return self._check_children_at if deadline is None else min(deadline, self._check_children_at)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._check_children_at = 0.0
        elif number == signal.SIGTSTP:
            self._pause()
        elif number == signal.SIGWINCH:
            self._resize()
        elif number in FORWARDED:
            self._supervisor.on_signal(number, time.monotonic())

    def _collect_ended(self, now: float) -> None:
        self._check_children_at = now + _LOST_SIGNAL_POLL_S
        codes: list[tuple[int, int]] = []
        for rank in self._supervisor.alive:
            process = self._processes[rank]
            if not process.ended():
                continue
            ended = process.reap()
            if self._guard is not None:
                self._guard.forget(process.pid)
            for stream in self._streams[rank]:
                self.loop.end_stream(stream)
            oom_kills = cgroup.oom_kills() if ended.code == -signal.SIGKILL else None
            if oom_kills is not None and self._oom_kills is not None:
                oom_kills -= self._oom_kills
            self._facts[rank] = RankFacts(
                pid=process.pid,
                peak_rss_bytes=ended.peak_rss_bytes,
                oom_kills=oom_kills,
                tail=tuple(line.decode("utf-8", "replace") for line in self._tails[rank]),
            )
            codes.append((rank, ended.code))
        if codes:
            self._supervisor.on_ends(codes, now)

    def _pause(self) -> None:
        """Ctrl-Z: stops the ranks with us. In sessions of their own they do not see it."""
        for rank in self._supervisor.alive:
            self._processes[rank].send_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self._supervisor.alive:  # here after SIGCONT
            self._processes[rank].send_group(signal.SIGCONT)

    def _resize(self) -> None:
        if self._terminal is not None and 0 in self._supervisor.alive:
            sink, terminal = self._terminal
            copy_window_size(sink.fd, terminal)
            self._processes[0].send(signal.SIGWINCH)

    # --- end ---

    def _finish(self) -> int:
        for sink in self.loop.sinks:
            sink.finish_line()
        result = self._result(remove_segments(self._segment_prefix))
        # First what the ranks have printed: the report then knows whether it arrived.
        patience = {} if self.loop.flush() else {"patience_s": _PATIENCE_S}
        lost = self.loop.lost_output()
        if lost and not result.exit_code:
            result = replace(result, exit_code=1)
        for reason in lost:
            self._say(f"output of the ranks was lost on {reason}")
        self._tell(result)
        self.loop.flush(**patience)
        return result.exit_code

    def _result(self, leftovers: tuple[str, ...]) -> LaunchResult:
        return LaunchResult(
            exit_code=self._supervisor.exit_code(),
            seconds=time.monotonic() - self._started_at,
            job_id=self._job_id,
            num_ranks=self._config.num_ranks,
            stop_signal=self._supervisor.stop_signal,
            ends=tuple(self._supervisor.ends),
            facts=self._facts,
            memory_limit_bytes=cgroup.memory_limit_bytes(),
            forwarded=tuple(n for n in FORWARDED if self._supervisor.forwarded(n)),
            leftovers=leftovers,
            restarts=self._restarts,
        )

    def _tell(self, result: LaunchResult) -> None:
        line = json.dumps(as_json(result))
        if self._config.json:
            self.loop.stderr.put_line(line.encode())
        else:
            for text in as_text(result):
                self._say(text)
        if self._config.report_path is not None:
            try:
                write_whole(self._config.report_path, line + "\n")
            except OSError as error:
                self._say(f"cannot write the report: {error}")

    def end_all(self) -> None:
        """Kills whatever still runs: after an orderly end nothing does."""
        for rank in self._supervisor.alive:
            if rank in self._processes:
                self._processes[rank].send(signal.SIGKILL)
                self._processes[rank].reap()
        remove_segments(self._segment_prefix)
        for log in self._logs.values():
            log.close()
        if self._guard is not None:
            self._guard.dismiss()

    def _say(self, text: str) -> None:
        self.loop.stderr.put_line(f"polyreme run: {text}".encode("utf-8", "replace"))
