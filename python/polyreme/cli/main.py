"""Entry point of the command line: finds the sub-command and runs it.

Only the module of the chosen sub-command is imported, so `polyreme --help` and `polyreme run`
stay quick and one broken command does not take the others with it. A sub-command module has
`add_parser(subparsers)`, which adds its parser, and `run(args)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from . import UsageError

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("polyreme.cli.run", "start a script as N ranks on this machine"),
    "data": ("polyreme.cli.data", "make and inspect token files"),
    "ckpt": ("polyreme.cli.ckpt", "look at checkpoints and convert them"),
    "verify": ("polyreme.cli.verify", "compare a script's bits over layouts"),
    "comm-report": ("polyreme.cli.comm_report", "say what went wrong between ranks"),
    "doctor": ("polyreme.cli.doctor", "show what this machine and this build can do"),
    "schedule": ("polyreme.cli.schedule", "show, draw and check pipeline schedules"),
    "bench": ("polyreme.cli.bench", "measure speed against other libraries"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `polyreme` with `argv` (default: the process's arguments); returns the exit code.

    2: wrong usage. 130: interrupted. 1: any other error of Polyreme, told in one line.
    """
    arguments: list[str] = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        return _run_and_flush(arguments)
    except UsageError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        _drop_output()  # its reader has gone
        return 1
    except Exception as error:
        if _is_own_error(error):
            return _fail(str(error), 1)
        if isinstance(error, OSError):
            _drop_output()
            return _fail(f"input or output failed: {error}", 1)
        raise


def _run_and_flush(arguments: list[str]) -> int:
    """So that lost output is found while it can be told."""
    try:
        return _run(arguments)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _open_closed_streams() -> None:
    """Gives /dev/null to those of 0, 1 and 2 that are closed: else the next file that is opened would be one."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, fd


def _drop_output() -> None:
    """Python must not complain again about the rest at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _run(arguments: list[str]) -> int:
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    module: ModuleType | None = None
    if chosen in COMMANDS:
        module = _load(chosen)
    parser = argparse.ArgumentParser(prog="polyreme", description="Distributed training runtime.")
    parser.add_argument("--version", action="store_true", help="print the version and end")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, help_line) in COMMANDS.items():
        if module is not None and name == chosen:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=help_line)
    args = parser.parse_args(arguments)
    if args.version:
        from polyreme import __version__

        print(f"polyreme {__version__}")
        return 0
    if module is None:
        parser.print_help()
        return 0 if not arguments else 2
    return int(module.run(args))


def _load(command: str) -> ModuleType:
    name = COMMANDS[command][0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"this installation has no '{command}' command") from error


def _is_own_error(error: Exception) -> bool:
    """An error of the package, whose message is written for the user."""
    errors = sys.modules.get("polyreme.errors")
    base = getattr(errors, "Error", None)
    return isinstance(base, type) and isinstance(error, base)


def _fail(message: str, code: int) -> int:
    print(f"polyreme: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
