"""The GPT-2 and Llama families in PyTorch, for any dtype: the yardstick of the numerical tests and of `bench step`."""

from __future__ import annotations

import math
import os

import numpy as np
import polyreme as pr
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


def rms_norm(params, name, x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * params[f"{name}.weight"]


def causal(q, k, v):
    """[batch, seq, heads, head_dim] each, to [batch, seq, heads * head_dim]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seq = q.shape[2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1) @ v
    return out.transpose(1, 2).flatten(2)


def attention(qkv, heads):
    batch, seq, features = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    return causal(*(t.reshape(batch, seq, heads, features // heads) for t in qkv.split(features, dim=-1)))


def turned(x, theta):
    """Rotary positions on [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies)[None, :, None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def grouped_attention(qkv, model):
    kv_heads = model.kv_heads or model.heads
    group, head_dim = model.heads // kv_heads, model.hidden // model.heads
    qkv = qkv.unflatten(-1, (kv_heads, group + 2, head_dim))
    q, k, v = qkv[..., :group, :].flatten(2, 3), qkv[..., group, :], qkv[..., group + 1, :]
    q, k = turned(q, model.rope_theta), turned(k, model.rope_theta)
    return causal(q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))


def llama_logits(params, model, tokens):
    x = params["wte.weight"][tokens]
    for i in range(model.layers):
        h = f"h.{i}"
        normed = rms_norm(params, f"{h}.ln_1", x, model.norm_eps)
        a = grouped_attention(linear(params, f"{h}.attn.qkv", normed), model)
        x = x + linear(params, f"{h}.attn.proj", a)
        gate_up = linear(params, f"{h}.mlp.gate_up", rms_norm(params, f"{h}.ln_2", x, model.norm_eps))
        gate, up = gate_up.chunk(2, dim=-1)
        x = x + linear(params, f"{h}.mlp.down", torch.nn.functional.silu(gate) * up)
    x = rms_norm(params, "ln_f", x, model.norm_eps)
    return x @ params["wte.weight" if model.tied else "lm_head.weight"].T


def logits(params, model, tokens):
    """[batch, seq, vocab] from int [batch, seq]."""
    tokens = torch.as_tensor(np.asarray(tokens), dtype=torch.long)
    if isinstance(model, pr.models.Llama):
        return llama_logits(params, model, tokens)
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
