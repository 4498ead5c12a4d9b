"""`polyreme ckpt`: looks at checkpoints and converts them, without ranks."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from polyreme.checkpoint.convert import compare, export_safetensors
from polyreme.checkpoint.directory import complete_steps, latest_step, resolve, step_name
from polyreme.checkpoint.hf import export_hf, import_hf
from polyreme.checkpoint.loader import CheckpointFiles
from polyreme.checkpoint.manifest import read_manifest
from polyreme.errors import CheckpointError, InvalidArgument

from . import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `ckpt` and of its actions."""
    parser = subparsers.add_parser("ckpt", help="look at checkpoints and convert them")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str, *paths: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for path in paths:
            action.add_argument(path.lower(), metavar=path)
        action.add_argument("--json", action="store_true", help="print JSON")
        return action

    add("list", "list the complete checkpoints of a directory", "DIRECTORY")
    add("inspect", "show what a checkpoint holds", "CHECKPOINT")
    add("verify", "read everything and check all checksums", "CHECKPOINT")
    add("diff", "compare two checkpoints bit by bit; exit code 1 if they differ", "CHECKPOINT", "OTHER")
    export = add("export", "write the weights as whole tensors", "CHECKPOINT")
    export.add_argument(
        "--to", choices=["safetensors", "hf"], required=True, help="a file, or a folder for transformers"
    )
    export.add_argument("--out", required=True, metavar="PATH", help="what to write; must not exist")
    export.add_argument("--all", action="store_true", help="optimizer state and other tensors too")
    source = add("import", "make a checkpoint of the weights of others", "FOLDER")
    source.add_argument("--from", dest="source", choices=["hf"], required=True, help="format")
    source.add_argument("--out", required=True, metavar="DIRECTORY", help="of the checkpoints")


def run(args: argparse.Namespace) -> int:
    """Does the action and returns the exit code."""
    try:
        return _ACTIONS[args.action](args)
    except (CheckpointError, InvalidArgument) as error:
        if args.action == "verify":
            raise
        raise UsageError(f"ckpt {args.action}: {error}") from error


def _show(args: argparse.Namespace, document: dict[str, Any] | list[Any], text: str) -> None:
    print(json.dumps(document, indent=2) if args.json else text)


def _list(args: argparse.Namespace) -> int:
    steps = complete_steps(args.directory)
    latest = latest_step(args.directory)
    if not os.path.isdir(args.directory):
        raise UsageError(f"ckpt list: there is no directory '{args.directory}'; give that of the checkpoints")
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, Any]] = []
    for step in steps:
        try:
            manifest = read_manifest(args.directory, step)
        except CheckpointError as error:
            damaged.append({"step": step, "damaged": str(error)})
            continue
        rows.append(
            {
                "step": step,
                "path": os.path.join(args.directory, step_name(step)),
                "bytes": manifest.num_bytes,
                "num_files": len(manifest.files),
                "num_ranks": manifest.layout.get("num_ranks"),
                "latest": step == latest,
            }
        )
    lines = [
        f"{r['step']:>10}  {r['bytes'] / 1e6:>12.1f} MB  {r['num_files']:>6} files{'  latest' if r['latest'] else ''}"
        for r in rows
    ]
    lines += [f"{r['step']:>10}  damaged: {r['damaged']}" for r in damaged]
    _show(args, [*rows, *damaged], "\n".join(lines) or f"no committed checkpoint in '{args.directory}'")
    return 1 if damaged else 0


def _inspect(args: argparse.Namespace) -> int:
    directory, step = resolve(args.checkpoint)
    manifest = read_manifest(directory, step)
    document = {
        "step": step,
        "generation": manifest.generation,
        "layout": manifest.layout,
        "state": manifest.state,
        "extras": manifest.extras,
        "files": [{"name": f.name, "bytes": f.size_bytes, "rank": f.rank} for f in manifest.files],
        "tensors": {n: {"dtype": t.dtype, "shape": list(t.shape)} for n, t in manifest.tensors.items()},
    }
    lines = [f"step {step}, generation {manifest.generation}, {manifest.num_bytes / 1e6:.1f} MB"]
    lines += [f"layout: {json.dumps(manifest.layout)}"]
    for title, values in (("state", manifest.state), ("extras", manifest.extras)):
        lines += [f"{title} {name}: {_brief(value)}" for name, value in values.items()]
    lines += [f"{f.name}  {f.size_bytes} bytes" for f in manifest.files]
    lines += [f"{name}  {t.dtype}{list(t.shape)}" for name, t in manifest.tensors.items()]
    _show(args, document, "\n".join(lines))
    return 0


def _brief(value: Any) -> str:
    """A counter for each parameter is one number, as a rule."""
    if isinstance(value, dict) and len(value) > 4:
        distinct = {json.dumps(each) for each in value.values()}
        if len(distinct) == 1:
            return f"{distinct.pop()} for each of {len(value)}"
    return json.dumps(value)


def _verify(args: argparse.Namespace) -> int:
    try:
        directory, step = resolve(args.checkpoint)
    except CheckpointError as error:  # nothing to verify, which is not the same as damage
        raise UsageError(f"ckpt verify: {error}") from error
    files = CheckpointFiles(directory, step)
    num_bytes = files.verify()
    document = {"step": step, "tensors": len(files.manifest.tensors), "bytes": num_bytes, "ok": True}
    _show(
        args,
        document,
        f"step {step}: {len(files.manifest.tensors)} tensors, {num_bytes} bytes: all checksums agree",
    )
    return 0


def _diff(args: argparse.Namespace) -> int:
    differences = compare(CheckpointFiles(*resolve(args.checkpoint)), CheckpointFiles(*resolve(args.other)))
    _show(args, differences, "\n".join(differences) or "equal, bit by bit")
    return 1 if differences else 0


def _export(args: argparse.Namespace) -> int:
    if args.to == "hf" and args.all:
        raise UsageError(
            "ckpt export: --all is for --to safetensors; a model of transformers has weights alone"
        )
    files = CheckpointFiles(*resolve(args.checkpoint))
    if args.to == "hf":
        written = export_hf(files, args.out)
        _show(args, {"folder": args.out, "files": written}, f"{args.out}: {', '.join(written)}")
        return 0
    exported = export_safetensors(files, args.out, everything=args.all)
    _show(args, {"file": args.out, "tensors": exported}, f"{args.out}: {len(exported)} tensors")
    return 0


def _import(args: argparse.Namespace) -> int:
    model = import_hf(args.folder, args.out)
    _show(
        args,
        {"directory": args.out, "step": 0, "model": repr(model)},
        f"{args.out}: step 0 of pr.models.{model!r}",
    )
    return 0


_ACTIONS = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "export": _export,
    "import": _import,
}
