"""What a local launch can be asked for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

PREFIX_MODES = ("auto", "always", "never")
BIND_MODES = ("auto", "none")
MAX_RESTARTS = 1_000_000
MAX_RANKS = 1024  # of one host: far more than its cores, and a slip of the keyboard does no harm


class LaunchError(ValueError):
    """A launch that cannot be started as asked: what was given, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One launch. Times are in seconds.

    command: the script and its arguments, or the module and its arguments with `module`.
    port: of the store on 127.0.0.1; 0 takes a free one.
    grace_s: from the first SIGINT or SIGTERM to SIGKILL.
    survivor_grace_s: from the first failed rank to SIGTERM for the others.
    kill_after_s: from that SIGTERM to SIGKILL.
    exit_grace_s: a rank that exits 0 this long before the others is a failure; None: only warn.
    restarts: how often all ranks are started again after a failure.

    Raises LaunchError on construction when a value cannot work.
    """

    num_ranks: int
    command: tuple[str, ...]
    module: bool = False
    bind: str = "auto"
    prefix: str = "auto"
    port: int = 0
    log_dir: str | None = None
    report_path: str | None = None
    json: bool = False
    nested: bool = False
    grace_s: float = 10.0
    survivor_grace_s: float = 0.0
    kill_after_s: float = 0.5
    exit_grace_s: float | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise LaunchError(
                f"the number of ranks is {self.num_ranks}; give -n 1 to {MAX_RANKS}, what one host can hold"
            )
        if self.bind not in BIND_MODES:
            raise LaunchError(f"bind is '{self.bind}'; one of {', '.join(BIND_MODES)}")
        if self.prefix not in PREFIX_MODES:
            raise LaunchError(f"prefix is '{self.prefix}'; one of {', '.join(PREFIX_MODES)}")
        if not 0 <= self.port <= 65535:
            raise LaunchError(f"port is {self.port}; 1 to 65535, or 0 for any free port")
        if not 0 <= self.restarts <= MAX_RESTARTS:
            raise LaunchError(f"restarts is {self.restarts}; give 0 to {MAX_RESTARTS}")
        for name in ("grace_s", "survivor_grace_s", "kill_after_s", "exit_grace_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise LaunchError(f"{name} is {value}; give a finite number of seconds >= 0")
        self._check_command()

    def _check_command(self) -> None:
        if not self.command:
            raise LaunchError(
                "no script given; usage: polyreme run -n N [options] script.py [arguments]"
                " (or -m module; options of the launcher come before the script)"
            )
        script = self.command[0]
        if self.module:
            return
        if script.startswith("-"):
            raise LaunchError(f"'{script}' is neither an option of polyreme run nor a script")
        if not os.path.exists(script):
            raise LaunchError(
                f"script '{script}' does not exist in {os.getcwd()}; check the path, or use -m for a module"
            )
        if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
            raise LaunchError(f"'{script}' is a directory without __main__.py; name a script")
        if not os.access(script, os.R_OK):
            raise LaunchError(f"script '{script}' is not readable; check its permissions")
