"""Text from a model: deterministic by seed, greedy at temperature 0, with a sliding window."""

from __future__ import annotations

import math

import numpy as np
import polyreme as pr
import pytest
from helpers import TINY, batches, fingerprint, make_trainer, refused

MODEL = pr.models.GPT(**TINY)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def trainer(world):
    """After a few steps, so that scores differ."""
    made = make_trainer(world, MODEL, optimizer=pr.AdamW(lr=1e-2))
    for tokens, targets in batches(3, 8, MODEL):
        made.step(tokens, targets)
    return made


def text(trainer, prompt=PROMPT, **options):
    return list(pr.generate(trainer, prompt, **{"num_tokens": 20, **options}))


def test_equal_seeds_give_equal_text(trainer):
    assert text(trainer, seed=5) == text(trainer, seed=5)
    assert len({tuple(text(trainer, seed=seed, temperature=2.0)) for seed in range(4)}) == 4


def test_tokens_are_of_the_vocabulary_and_as_many_as_asked_for(trainer):
    for num_tokens in (0, 1, 50):
        found = text(trainer, num_tokens=num_tokens, temperature=3.0, top_k=10**6)
        assert len(found) == num_tokens
        assert all(type(token) is int and 0 <= token < MODEL.vocab for token in found)


def test_temperature_0_takes_the_likeliest(trainer):
    context = list(PROMPT)
    for _ in range(40):  # well beyond seq_len
        scores = trainer.logits([context[-MODEL.seq_len :]])[0, -1]
        context.append(int(scores.argmax()))
    assert len(context) > MODEL.seq_len
    assert text(trainer, temperature=0, num_tokens=40) == context[len(PROMPT) :]
    assert text(trainer, temperature=0, num_tokens=40, seed=9) == text(trainer, temperature=0, num_tokens=40)


def test_the_likeliest_alone_is_the_likeliest(trainer):
    assert text(trainer, top_k=1, temperature=5.0) == text(trainer, temperature=0)


def test_a_low_temperature_nears_the_likeliest(trainer):
    assert text(trainer, temperature=1e-8) == text(trainer, temperature=0)


def test_top_k_leaves_the_others_out(trainer):
    scores = trainer.logits([PROMPT])[0, -1]
    best = set(np.argsort(scores)[-3:].tolist())
    seen = {text(trainer, num_tokens=1, top_k=3, temperature=10.0, seed=seed)[0] for seed in range(60)}
    assert seen == best


def test_a_long_prompt_is_cut_to_the_last_tokens(trainer):
    prompt = [i % MODEL.vocab for i in range(3 * MODEL.seq_len)]
    assert text(trainer, prompt) == text(trainer, prompt[-MODEL.seq_len :])


def test_an_array_is_a_prompt_too(trainer):
    assert text(trainer, np.array(PROMPT)) == text(trainer, PROMPT)


def test_the_trainer_stays_as_it_was(trainer):
    before = fingerprint(trainer)
    text(trainer)
    assert fingerprint(trainer) == before


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        ([], {}, ["prompt is empty", "at least one token"]),
        (PROMPT, {"temperature": -0.5}, ["temperature=-0.5", "0 or more"]),
        (PROMPT, {"temperature": math.nan}, ["temperature=nan"]),
        (PROMPT, {"top_k": 0}, ["top_k=0", "at least 1"]),
        (PROMPT, {"num_tokens": -1}, ["num_tokens=-1", "at least 0"]),
        (PROMPT, {"top_k": 2.0}, ["top_k=2.0", "float"]),
        (PROMPT, {"temperature": "1"}, ["temperature='1'", "str"]),
        (PROMPT, {"seed": -1}, ["seed=-1", "2^64 - 1"]),
    ],
)
def test_bad_arguments_are_refused_at_the_call(trainer, prompt, options, words):
    arguments = {"num_tokens": 3, **options}
    refused(pr.InvalidArgument, ["generate", *words], lambda: pr.generate(trainer, prompt, **arguments))


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([1, MODEL.vocab], [f"token {MODEL.vocab}", "position 1"]),
        ([-1], ["token -1"]),
        ([0.5, 1], ["float64"]),
    ],
)
def test_prompts_that_are_no_tokens_are_refused(trainer, prompt, words):
    refused(pr.InvalidArgument, words, lambda: text(trainer, prompt))


def test_scores_that_are_not_finite_are_told(world):
    broken = make_trainer(world, MODEL)
    broken.set_parameter("ln_f.bias", np.full(MODEL.hidden, np.nan, np.float32))
    refused(pr.NumericError, ["after 3 tokens", "not finite"], lambda: text(broken))
