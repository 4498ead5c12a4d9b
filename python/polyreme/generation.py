"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .checks import MAX_SEED, check_int, check_number, check_type
from .errors import InvalidArgument, NumericError
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
    """Yields `num_tokens` tokens that continue `prompt`; the same on every rank that has the same arguments.

    Collective where `Trainer.logits` is: along tp and pp, and with zero=3, all ranks iterate it to the end. Otherwise
    one rank may call it alone.

    Each token is drawn from the `top_k` likeliest at `temperature` (0: always the likeliest). Past
    the model's seq_len the oldest tokens are forgotten.

    Raises:
        InvalidArgument: an empty prompt, or arguments out of range.
        NumericError: the model's scores are not finite.
    """
    check_type("generate: trainer", trainer, Trainer, "a polyreme.Trainer")
    if len(prompt) == 0:
        raise InvalidArgument("generate: the prompt is empty; give at least one token")
    num_tokens = check_int("generate: num_tokens", num_tokens, 0)
    temperature = check_number("generate: temperature", temperature)
    top_k = check_int("generate: top_k", top_k, 1)
    seed = check_int("generate: seed", seed, 0, MAX_SEED)
    return _continue(trainer, list(prompt), num_tokens, temperature, top_k, seed)


def _continue(
    trainer: Trainer, context: list[int], num_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    random = np.random.Generator(np.random.Philox(seed))
    for _ in range(num_tokens):
        window = context[-trainer.model.seq_len :]
        scores = trainer.logits([window])[0, -1].astype(np.float64)
        if not np.isfinite(scores).all():
            raise NumericError(
                f"generate: scores after {len(context)} tokens are not finite; look at the weights and the loss"
            )
        if temperature == 0:
            token = int(scores.argmax())
        else:
            best = np.argsort(scores)[-top_k:]
            weights = np.exp((scores[best] - scores[best].max()) / temperature)
            token = int(random.choice(best, p=weights / weights.sum()))
        context.append(token)
        yield token
