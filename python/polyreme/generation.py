"""Text from a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .errors import InvalidArgument
from .trainer import Trainer

__all__ = ["generate"]


def generate(
    trainer: Trainer,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yields `num_tokens` tokens that continue `prompt`. Not collective: call it on one rank.

    Each token is drawn from the `top_k` likeliest at `temperature` (0: always the likeliest). Past
    the model's seq_len the oldest tokens are forgotten.

    Raises:
        InvalidArgument: an empty prompt, or arguments out of range.
    """
    if len(prompt) == 0:
        raise InvalidArgument("generate: the prompt is empty; give at least one token")
    if not 0 <= temperature < math.inf or top_k < 1 or num_tokens < 0:
        raise InvalidArgument(
            f"generate: temperature={temperature}, top_k={top_k}, num_tokens={num_tokens};"
            " expected temperature >= 0, top_k >= 1, num_tokens >= 0"
        )
    return _continue(trainer, list(prompt), num_tokens, temperature, top_k, seed)


def _continue(
    trainer: Trainer, context: list[int], num_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    random = np.random.Generator(np.random.Philox(seed))
    for _ in range(num_tokens):
        window = context[-trainer.model.seq_len :]
        scores = trainer.logits([window])[0, -1].astype(np.float64)
        if temperature == 0:
            token = int(scores.argmax())
        else:
            best = np.argsort(scores)[-top_k:]
            weights = np.exp((scores[best] - scores[best].max()) / temperature)
            token = int(random.choice(best, p=weights / weights.sum()))
        context.append(token)
        yield token
