"""Refusals of token files and data sets: the class, the words, and nothing changed."""

from __future__ import annotations

import math
import os
import struct

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, batches, refused, refused_unchanged, token_file

MODEL = pr.models.GPT(**TINY)
TOKENS, TARGETS = batches(1, 8, MODEL)[0]
VOCAB, SEQ = MODEL.vocab, MODEL.seq_len


def header(version=1, code=2, num_tokens=8, vocab=300, magic=b"POLYTOK1"):
    return struct.pack("<8sIIQQI", magic, version, code, num_tokens, vocab, 0).ljust(64, b"\0")


FILES = {
    "empty": (b"", ["0 bytes", "64"]),
    "text": (b"import os\n" * 20, ["not a token file", "POLYTOK1", "polyreme data prepare"]),
    "header_only": (header(num_tokens=0), ["no tokens", "polyreme data prepare"]),
    "cut": (header() + bytes(15), ["damaged", "8 tokens of 2 bytes", "15 bytes", "polyreme data prepare"]),
    "too_long": (header() + bytes(18), ["damaged", "18 bytes"]),
    "later_version": (header(version=2) + bytes(16), ["version 2", "version 1"]),
    "other_tokens": (header(code=3) + bytes(24), ["3 bytes per token", "2 or 4"]),
    "no_vocabulary": (header(vocab=0) + bytes(16), ["vocab_size 0"]),
    "too_short": (header() + bytes(16), ["8 tokens", "seq_len=24", "25", "use more text"]),
}


@pytest.mark.parametrize("name", FILES)
def test_token_files(tmp_path, name):
    content, words = FILES[name]
    path = tmp_path / "corpus.bin"
    path.write_bytes(content)
    refused(pr.InvalidArgument, ["corpus.bin", *words], lambda: pr.data.TokenDataset(path, seq_len=SEQ))


def test_missing_corpus(tmp_path):
    path = tmp_path / "none.bin"
    words = ["none.bin", os.strerror(2), "polyreme data prepare"]
    refused(pr.InvalidArgument, words, lambda: pr.data.TokenDataset(path, seq_len=SEQ))
    refused(
        pr.InvalidArgument,
        [str(tmp_path), "not a regular file"],
        lambda: pr.data.TokenDataset(tmp_path, seq_len=1),
    )


@pytest.mark.parametrize("seq_len", [0, -1])
def test_dataset_with_an_impossible_length(corpus, seq_len):
    words = [f"seq_len={seq_len}", "at least 1"]
    refused(pr.InvalidArgument, words, lambda: pr.data.TokenDataset(corpus, seq_len=seq_len))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
def test_split_by_an_impossible_share(corpus, share):
    data = pr.data.TokenDataset(corpus, seq_len=SEQ)
    refused(
        pr.InvalidArgument,
        [f"validation={share}", "0 < validation < 1"],
        lambda: data.split(validation=share),
    )


def test_split_into_less_than_a_sample(corpus):
    data = pr.data.TokenDataset(corpus, seq_len=SEQ)
    for share in (1e-6, 1 - 1e-6):
        refused(
            pr.InvalidArgument,
            ["too few", "shorter seq_len"],
            lambda share=share: data.split(validation=share),
        )


def test_vocabulary_that_the_data_exceeds(trainer, corpus, tmp_path):
    data = pr.data.TokenDataset(corpus, seq_len=SEQ)
    fitting = pr.data.TokenDataset(token_file(tmp_path, np.arange(99) % VOCAB, VOCAB), seq_len=SEQ)
    for use in (
        lambda: trainer.fit(data, steps=9),
        lambda: trainer.fit(fitting, steps=9, validation=data),
        lambda: trainer.evaluate(data),
    ):
        words = ["corpus.bin", "257", str(VOCAB), "vocab >= 257"]
        refused_unchanged(trainer, pr.InvalidArgument, words, use)


def test_length_that_is_not_the_models(trainer, tmp_path):
    data = pr.data.TokenDataset(token_file(tmp_path, np.arange(99) % VOCAB, VOCAB), seq_len=SEQ - 1)
    words = [f"seq_len={SEQ - 1}", f"seq_len={SEQ}", "use the same"]
    refused_unchanged(trainer, pr.InvalidArgument, words, lambda: trainer.fit(data, steps=9))


def test_a_file_whose_header_lies_about_its_vocabulary(trainer, tmp_path):
    tokens = [*range(VOCAB), 200, *[0] * (8 * SEQ - VOCAB)]  # 8 samples: each batch has all
    path = token_file(tmp_path, tokens, 201)
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 24, VOCAB)
    path.write_bytes(content)
    data = pr.data.TokenDataset(path, seq_len=SEQ)
    words = ["token 200", f"position {VOCAB}", f"of {VOCAB}"]
    refused_unchanged(trainer, pr.InvalidArgument, words, lambda: list(trainer.fit(data, steps=5)))
    refused(pr.InvalidArgument, words, lambda: trainer.evaluate(data))
    refused(pr.InvalidArgument, words, lambda: list(data))


@pytest.mark.parametrize("num_samples", [0, -1])
def test_evaluation_of_nothing(trainer, tmp_path, num_samples):
    data = pr.data.TokenDataset(token_file(tmp_path, np.arange(99) % VOCAB, VOCAB), seq_len=SEQ)
    words = [f"num_samples={num_samples}", "at least 1"]
    refused(pr.InvalidArgument, words, lambda: trainer.evaluate(data, num_samples=num_samples))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": -1}, ["steps=-1"]),
        ({"steps": 2.0}, ["steps=2.0", "float"]),
        ({"validate_every": -1}, ["validate_every=-1"]),
        ({"validate_every": "1"}, ["validate_every='1'"]),
        ({"validation_samples": 0}, ["validation_samples=0", "None"]),
    ],
)
def test_fit(trainer, tmp_path, options, words):
    data = pr.data.TokenDataset(token_file(tmp_path, np.arange(999) % VOCAB, VOCAB), seq_len=SEQ)
    refused_unchanged(
        trainer, pr.InvalidArgument, ["fit", *words], lambda: trainer.fit(data, **{"steps": 9, **options})
    )


def test_fewer_samples_than_a_batch(trainer, tmp_path):
    data = pr.data.TokenDataset(token_file(tmp_path, np.arange(7 * SEQ + 1) % VOCAB, VOCAB), seq_len=SEQ)
    words = ["7 samples", "global_batch=8", "repeat"]
    refused_unchanged(trainer, pr.InvalidArgument, words, lambda: trainer.fit(data, steps=9))


@pytest.mark.parametrize("seq_len", [True, 4.0, "4"])
def test_dataset_with_another_type_of_length(corpus, seq_len):
    refused(
        pr.InvalidArgument,
        [f"seq_len={seq_len!r}", "integer"],
        lambda: pr.data.TokenDataset(corpus, seq_len=seq_len),
    )
