"""A contender of `bench step`: its ranks as processes of this host, commanded line by line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import IO, Any

from ..errors import Error
from ..launch import env
from ..launch.process import RankProcess
from ..launch.system import listen, remove_segments

__all__ = ["Contender"]

_LAST_WORDS_S = 5.0  # from the end of a rank's answers to its exit


class Contender:
    """Ranks that run `polyreme.bench.step_worker`, whose commands and answers they take; each pinned to CPUs of its own.

    They are started with the variables of a launcher, which all contenders find alike.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        ranks, threads = settings["ranks"], settings["threads"]
        cpus, quota = env.usable_cpus()
        plan = env.plan_cpus(cpus, ranks, quota=quota)
        self._job_id = os.urandom(8).hex()
        self._processes: list[RankProcess] = []
        self._commands: list[IO[str]] = []
        self._answers: list[IO[str]] = []
        base = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with listen(0, ranks) as store:
            job = env.JobSettings(
                num_ranks=ranks,
                port=store.getsockname()[1],
                job_id=self._job_id,
                secret=os.urandom(32).hex(),
                num_threads=threads,
            )
            try:
                for rank in range(ranks):
                    variables = env.rank_environment(
                        base, job, rank=rank, store_fd=store.fileno() if rank == 0 else None
                    )
                    binding = None if plan.bindings is None else plan.bindings[rank][:threads]
                    self._start(rank, variables, binding, settings, (store.fileno(),) if rank == 0 else ())
                self._collect()
            except BaseException:
                self.close()
                raise

    def _start(
        self,
        rank: int,
        variables: dict[str, str],
        cpus: tuple[int, ...] | None,
        settings: dict[str, Any],
        pass_fds: tuple[int, ...],
    ) -> None:
        text = json.dumps({**settings, "contender": self.name, "rank": rank})
        command = (sys.executable, "-m", "polyreme.bench.step_worker", text)
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        self._commands.append(open(our_output, "w", encoding="utf-8"))  # noqa: SIM115  (close() closes)
        self._answers.append(open(our_input, encoding="utf-8"))  # noqa: SIM115
        try:
            process = RankProcess(
                command,
                variables,
                rank=rank,
                cpus=cpus,
                stdin=their_input,
                stdout=their_output,
                stderr=2,
                pass_fds=pass_fds,
            )
        finally:
            os.close(their_input)
            os.close(their_output)
        self._processes.append(process)

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Sends the command to every rank, then waits for all their answers, in order of rank.

        Raises:
            Error: a rank has ended.
        """
        for pipe in self._commands:
            with contextlib.suppress(BrokenPipeError):  # told below
                pipe.write(json.dumps({"do": command}) + "\n")
                pipe.flush()
        return self._collect()

    def _collect(self) -> list[dict[str, Any]]:
        answers = []
        for process, pipe in zip(self._processes, self._answers, strict=True):
            line = pipe.readline()
            if not line:
                deadline = time.monotonic() + _LAST_WORDS_S
                while not process.ended() and time.monotonic() < deadline:
                    time.sleep(0.01)
                code = process.reap().code
                self._processes.remove(process)
                of = f" (rank {process.rank})" if len(self._answers) > 1 else ""
                raise Error(f"bench step: '{self.name}'{of} ended with exit code {code}; its error is above")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """Kills the ranks that are left; nothing of them stays."""
        for process in self._processes:
            process.send_group(signal.SIGKILL)
            process.reap()
        self._processes.clear()
        for pipe in (*self._commands, *self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        remove_segments(f"polyreme-{self._job_id}-")
