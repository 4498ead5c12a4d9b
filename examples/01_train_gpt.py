"""Trains a byte-level GPT on the source code of Python's standard library, data-parallel.

    polyreme run -n 2 examples/01_train_gpt.py

The corpus is made on the first run and kept in the cache folder; `--data FILE` takes another token
file (see `polyreme data prepare`). With equal --lanes, any number of ranks gives the same bits.
"""

import argparse
import contextlib
import os
import sysconfig
from pathlib import Path

import polyreme as pr
from polyreme.data.prepare import prepare_bytes

SEPARATOR = 256


def default_corpus() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "polyreme" / f"python-{sysconfig.get_python_version()}-stdlib.bin"


def prepare_corpus(path: Path) -> None:
    """Makes a token file of the standard library's modules, without its tests."""
    if path.exists():
        return
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "__pycache__"}
    sources = [
        str(entry) for entry in sorted(folder.iterdir()) if entry.is_dir() and entry.name not in left_out
    ]
    sources += [str(entry) for entry in sorted(folder.glob("*.py"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus = prepare_bytes(sources, str(path), include=["*.py"])
    print(f"prepared {corpus.train.num_tokens:,} tokens of {folder} in {path}", flush=True)


def visible(text: str) -> str:
    """Without the control characters that a young model may produce: terminals act on them."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="token file; default: made of the standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=16, help="samples of a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=4, help="lanes.dp: a power of two that the ranks divide")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="directory to save to, and to go on from")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--generate", type=int, default=200, help="tokens of text at the end")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    world = pr.init()
    path = args.data or default_corpus()
    if world.rank == 0 and args.data is None:
        prepare_corpus(path)
    world.barrier()
    train, validation = pr.data.TokenDataset(path, seq_len=args.seq_len).split(validation=0.05)

    mesh = pr.Mesh(world)
    model = pr.models.GPT(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        vocab=train.vocab_size,
        seq_len=args.seq_len,
        dropout=args.dropout,
    )
    trainer = pr.Trainer(
        model,
        mesh,
        optimizer=pr.AdamW(
            lr=pr.lr.warmup_cosine(peak=args.lr, warmup=min(20, args.steps), total=args.steps),
            betas=(0.9, 0.95),
            weight_decay=0.1,
        ),
        clip_norm=1.0,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        lanes=pr.Lanes(dp=args.lanes),
        seed=args.seed,
    )
    trainer.peak_flops = pr.measure_peak_flops(mesh, model, micro_batch=args.micro_batch)
    if world.rank == 0:
        print(
            f"{trainer.num_parameters:,} parameters, {world.size} ranks, {world.device};"
            f" {train.num_tokens:,} tokens; sgemm {trainer.peak_flops / 1e9:.0f} GFLOP/s",
            flush=True,
        )

    checkpoints = pr.Checkpointer(args.checkpoints, every=args.every) if args.checkpoints else None
    with checkpoints or contextlib.nullcontext():
        if checkpoints:
            trainer.resume(checkpoints)
        progress = pr.Progress(args.steps, enabled=world.rank == 0)
        for stats in trainer.fit(
            train,
            steps=args.steps,
            validation=validation,
            validate_every=50,
            validation_samples=64,
            checkpoints=checkpoints,
        ):
            progress.report(stats)

    if world.rank == 0 and args.generate > 0:
        prompt = "def "
        tokens = pr.generate(trainer, [SEPARATOR, *prompt.encode()], num_tokens=args.generate, seed=args.seed)
        text = bytes(token for token in tokens if token < SEPARATOR).decode("utf-8", "replace")
        print(f"--- generated from {prompt!r} ---\n{prompt}{visible(text)}", flush=True)
    world.barrier()


if __name__ == "__main__":
    main()
