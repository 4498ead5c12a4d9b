"""`polyreme comm-report`: the verdict on a job's collectives, from what its ranks recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import UsageError

_DESCRIPTION = """\
Reads the journals that the ranks of a job wrote into DIR (POLYREME_RECORD_DIR, `polyreme run
--record-dir`, or pr.init(record_dir=)), also after the ranks were killed, and says which ranks never
arrived at which operation, what they did last, who waited how long, whose calls differed, and which
ranks are usually late.
"""
_EPILOG = """\
Exit code: 0 if nothing is wrong, 1 if there is a verdict or no journal, 2 if DIR cannot be read. Of a
job that still runs, the operations in flight are reported as not ended.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `comm-report`."""
    parser = subparsers.add_parser(
        "comm-report",
        help="say what went wrong between ranks",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="directory of the journals")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit code."""
    from polyreme.comm_report import examine, render

    try:
        report = examine(Path(args.folder))
    except OSError as error:
        raise UsageError(
            f"comm-report: {error}; give the directory that --record-dir or POLYREME_RECORD_DIR named"
        ) from error
    print(json.dumps(report.as_json()) if args.json else "\n".join(render(report)))
    return 0 if report.ok else 1
