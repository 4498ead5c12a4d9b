"""`polyreme data`: makes token files of text files, and shows their headers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from polyreme.data.prepare import Prepared, prepare_bytes
from polyreme.data.token_file import TokenFileError, TokenFileInfo, read_info

from . import UsageError
from .signals import signals_raise

_PROGRESS_PERIOD_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `data` and of its actions."""
    parser = subparsers.add_parser("data", help="make and inspect token files")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    prepare = actions.add_parser(
        "prepare",
        help="make a token file of text files",
        description="Makes a token file of all UTF-8 text files at and below the paths. Hidden"
        " files and symbolic links below a folder are left out, binary files are counted.",
    )
    prepare.add_argument("paths", nargs="+", metavar="PATH", help="files and folders")
    prepare.add_argument("--out", required=True, metavar="FILE", help="token file to write")
    prepare.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="take only files below folders that match, such as '*.py'; may be repeated",
    )
    prepare.add_argument("--tokenizer", choices=["bytes"], default="bytes", help="(bytes)")
    prepare.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="put about this share of the documents into FILE.val (corpus.val.bin), 0 to 0.5",
    )
    prepare.add_argument("--json", action="store_true", help="print the result as JSON")

    info = actions.add_parser("info", help="show the header of a token file")
    info.add_argument("file", metavar="FILE")
    info.add_argument("--check", action="store_true", help="also read and check all tokens")
    info.add_argument("--json", action="store_true", help="print the header as JSON")


def run(args: argparse.Namespace) -> int:
    """Does the action and returns the exit code."""
    try:
        return _prepare(args) if args.action == "prepare" else _info(args)
    except TokenFileError as error:
        raise UsageError(f"data {args.action}: {error}") from error
    except OSError as error:
        raise UsageError(
            f"data {args.action}: {error}; check the path, its permissions and the free space"
        ) from error


def _prepare(args: argparse.Namespace) -> int:
    progress = _ProgressLine()
    with signals_raise():
        try:
            result = prepare_bytes(
                args.paths,
                args.out,
                include=args.include,
                val_fraction=args.val_fraction,
                progress=progress.show if sys.stderr.isatty() else None,
            )
        finally:
            progress.clear()
    if args.json:
        print(json.dumps(_prepared_json(result)))
        return 0
    corpus = result.corpus
    print(
        f"{len(corpus.documents)} files, {corpus.num_skipped} left out"
        f" ({corpus.skipped_binary} binary, {corpus.skipped_empty} empty,"
        f" {corpus.skipped_unreadable} unreadable), {result.seconds:.1f} s"
    )
    for info in (result.train, result.val):
        if info is not None:
            print(f"{info.path}: {info.num_tokens} tokens, {info.size_bytes} bytes")
    return 0


def _info(args: argparse.Namespace) -> int:
    info = read_info(args.file, check_payload=args.check)
    if args.json:
        print(json.dumps(_info_json(info)))
        return 0
    print(f"{info.path}: {info.num_tokens} tokens of {info.dtype}, vocabulary {info.vocab_size}")
    checked = "checked" if args.check else "not checked; use --check"
    print(f"{info.size_bytes} bytes, crc32 {info.crc32:08x} ({checked})")
    return 0


def _info_json(info: TokenFileInfo) -> dict[str, object]:
    return dataclasses.asdict(info)


def _prepared_json(result: Prepared) -> dict[str, object]:
    corpus = result.corpus
    return {
        "event": "data_prepared",
        "train": _info_json(result.train),
        "val": None if result.val is None else _info_json(result.val),
        "num_files": len(corpus.documents),
        "num_val_documents": result.num_val_documents,
        "num_bytes": corpus.num_bytes,
        "skipped_binary": corpus.skipped_binary,
        "skipped_empty": corpus.skipped_empty,
        "skipped_unreadable": corpus.skipped_unreadable,
        "seconds": round(result.seconds, 3),
    }


class _ProgressLine:
    """One line on stderr that is drawn over; only for a terminal."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._start = time.monotonic()
        self._drawn = False

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _PROGRESS_PERIOD_S
        self._drawn = True
        rate = done / max(now - self._start, 1e-3) / 1e6
        percent = 100 * done // max(total, 1)
        sys.stderr.write(f"\r{percent:3d} % of {total / 1e6:.1f} MB, {rate:.0f} MB/s\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
