"""`polyreme run`: starts a script as N ranks on this machine."""

from __future__ import annotations

import argparse
import os

from polyreme.launch.config import BIND_MODES, PREFIX_MODES, LaunchConfig, LaunchError
from polyreme.launch.launcher import launch

from . import UsageError

_DESCRIPTION = """\
Starts N ranks of a Python script on this machine and ends them together: when one fails, the
others are ended within a second and the first cause is reported. Options of the launcher come
before the script; everything after it belongs to the script.
"""
_EPILOG = """\
Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
POLYREME_NUM_THREADS in its environment. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed
on to the ranks; the first SIGINT or SIGTERM starts the grace period, a second SIGINT kills.
A stop that was asked for is not followed by a restart. POLYREME_RESTART_COUNT says how many there were.
Processes that a rank has forked end with it. Rank 0 has the launcher's standard input.

Exit code: 0 if all ranks exited 0; the first failed rank's code, or 128 + its signal; 2 if the
launch could not start.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `run`."""
    parser = subparsers.add_parser(
        "run",
        help="start a script as N ranks on this machine",
        usage="polyreme run -n N [options] [--] script.py [arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--num-ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add(
        "--bind",
        choices=BIND_MODES,
        default="auto",
        help="auto: an equal share of the CPUs for each rank, if there are enough (default)",
    )
    add(
        "--prefix",
        choices=PREFIX_MODES,
        default="auto",
        help="mark lines with [rank]; auto: if N > 1, except JSON lines of rank 0, and rank 0"
        " has a terminal if the launcher has; always: rank 0 too is read through a pipe",
    )
    add("--log-dir", metavar="DIR", help="also write the output of rank K to DIR/rank-K.log")
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a failure start all ranks again, up to N times (0); scripts that resume go on from"
        " their last checkpoint, or from its newer copy in memory (Checkpointer(memory_every=))",
    )
    add("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    add("--nested", action="store_true", help="start even if this process is a rank already")
    add("--json", action="store_true", help="end with a report in one line of JSON on stderr")
    add(
        "--record-dir",
        metavar="DIR",
        help="each rank keeps the journal of its last collectives in DIR, also if it is killed;"
        " `polyreme comm-report DIR` reads them",
    )
    add("--report", metavar="FILE", help="write that report to FILE")
    times = parser.add_argument_group("times in seconds")
    add = times.add_argument
    add("--grace", type=float, metavar="S", default=10.0, help="from SIGINT or SIGTERM to SIGKILL (10)")
    add(
        "--survivor-grace",
        type=float,
        metavar="S",
        default=0.0,
        help="from the first failed rank to SIGTERM for the others (0)",
    )
    add("--kill-after", type=float, metavar="S", default=0.5, help="from that SIGTERM to SIGKILL (0.5)")
    add(
        "--exit-grace",
        type=float,
        metavar="S",
        default=None,
        help="a rank that exits 0 this long before the others counts as failed (default: never;"
        " a notice is printed after 30)",
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Launches, waits for the end and returns the exit code."""
    command = list(args.command_line)
    if command and command[0] == "--":
        del command[0]
    if args.record_dir is not None:
        os.environ["POLYREME_RECORD_DIR"] = os.path.abspath(args.record_dir)
    try:
        config = LaunchConfig(
            num_ranks=args.num_ranks,
            command=tuple(command),
            module=args.module,
            bind=args.bind,
            prefix=args.prefix,
            port=args.port,
            log_dir=args.log_dir,
            report_path=args.report,
            json=args.json,
            nested=args.nested,
            grace_s=args.grace,
            survivor_grace_s=args.survivor_grace,
            kill_after_s=args.kill_after,
            exit_grace_s=args.exit_grace,
            restarts=args.restarts,
        )
        return launch(config)
    except LaunchError as error:
        raise UsageError(f"run: {error}") from error
