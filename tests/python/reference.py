"""The GPT-2 family in PyTorch, for any dtype: the yardstick of the numerical tests and of `bench step`."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

if os.environ.get("POLYREME_REQUIRE_TORCH"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")

IGNORE = -100


def parameters(trainer, dtype):
    """Leaf tensors with the trainer's weights, by name."""
    return {
        name: torch.tensor(trainer.parameter(name), dtype=dtype, requires_grad=True)
        for name in trainer.parameter_names()
    }


def linear(params, name, x):
    return torch.nn.functional.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def layer_norm(params, name, x):
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"], 1e-5
    )


def attention(qkv, heads):
    batch, seq, features = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (
        t.reshape(batch, seq, heads, features // heads).transpose(1, 2) for t in qkv.split(features, dim=-1)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(features // heads)
    mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1) @ v
    return out.transpose(1, 2).reshape(batch, seq, features)


def logits(params, model, tokens):
    """[batch, seq, vocab] from int [batch, seq]."""
    tokens = torch.as_tensor(np.asarray(tokens), dtype=torch.long)
    x = params["wte.weight"][tokens] + params["wpe.weight"][: tokens.shape[1]]
    for i in range(model.layers):
        h = f"h.{i}"
        a = attention(linear(params, f"{h}.attn.qkv", layer_norm(params, f"{h}.ln_1", x)), model.heads)
        x = x + linear(params, f"{h}.attn.proj", a)
        m = linear(params, f"{h}.mlp.fc", layer_norm(params, f"{h}.ln_2", x))
        x = x + linear(params, f"{h}.mlp.proj", torch.nn.functional.gelu(m, approximate="tanh"))
    x = layer_norm(params, "ln_f", x)
    return x @ params["wte.weight" if model.tied else "lm_head.weight"].T


def loss(params, model, tokens, targets):
    """Mean over the targets that are not IGNORE."""
    scores = logits(params, model, tokens)
    flat = torch.as_tensor(np.asarray(targets), dtype=torch.long).reshape(-1)
    return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), flat, ignore_index=IGNORE)


def relative_error(value, exact):
    """Norm of the difference over the norm of `exact`, in float64."""
    exact = np.asarray(exact, dtype=np.float64)
    return float(
        np.linalg.norm(np.asarray(value, dtype=np.float64) - exact) / max(np.linalg.norm(exact), 1e-300)
    )
