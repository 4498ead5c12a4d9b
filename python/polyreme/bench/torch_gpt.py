"""The same GPT in PyTorch, as one would write it there: the rival of `bench step`.

Needs PyTorch, which is imported here and nowhere else in the package but in other files of bench.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..models import GPT

__all__ = ["SplitAttention", "TorchGPT", "TorchStage", "groups", "load_weights"]


class _Attention(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.proj = nn.Linear(model.hidden, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.proj(out.transpose(1, 2).reshape(batch, seq, hidden))
        return result


class SplitAttention(nn.Module):
    """The same with q, k and v apart, so that each can be cut by heads: of the heads that it is given, maybe a part."""

    def __init__(self, whole: _Attention) -> None:
        super().__init__()
        hidden = whole.proj.in_features
        self.head_dim = hidden // whole.heads
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.proj = whole.proj
        with torch.no_grad():
            for part, weight, bias in zip(
                (self.q, self.k, self.v), whole.qkv.weight.chunk(3), whole.qkv.bias.chunk(3), strict=True
            ):
                part.weight.copy_(weight)
                part.bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations to activations."""
        parts = (part(x) for part in (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in parts)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return result


class _Mlp(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        mlp_hidden = model.mlp_hidden or 4 * model.hidden
        self.fc = nn.Linear(model.hidden, mlp_hidden)
        self.proj = nn.Linear(mlp_hidden, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.proj(functional.gelu(self.fc(x), approximate="tanh"))
        return result


class _Block(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(model.hidden, model.layer_norm_eps)
        self.attn = _Attention(model)
        self.ln_2 = nn.LayerNorm(model.hidden, model.layer_norm_eps)
        self.mlp = _Mlp(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        result: torch.Tensor = x + self.mlp(self.ln_2(x))
        return result


class TorchGPT(nn.Module):
    """Parameters have the names and shapes of the native model. Without dropout."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.wte = nn.Embedding(model.vocab, model.hidden)
        self.wpe = nn.Embedding(model.seq_len, model.hidden)
        self.h = nn.ModuleList(_Block(model) for _ in range(model.layers))
        self.ln_f = nn.LayerNorm(model.hidden, model.layer_norm_eps)
        self.lm_head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss; tokens and targets are int64 [batch, seq]."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


class TorchStage(nn.Module):
    """The blocks [begin, end) of a TorchGPT, with what is before the first and after the last of them."""

    def __init__(self, whole: TorchGPT, begin: int, end: int) -> None:
        super().__init__()
        self.is_first, self.is_last = begin == 0, end == len(whole.h)
        if self.is_first:
            self.wte, self.wpe = whole.wte, whole.wpe
        self.h = whole.h[begin:end]
        if self.is_last:
            self.ln_f, self.lm_head = whole.ln_f, whole.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or activations to activations or logits."""
        if self.is_first:
            x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)) if self.is_last else x


def groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups by the native default rule: no decay below two dims."""
    decayed = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def load_weights(module: TorchGPT, read: Any) -> None:
    """Copies read(name), an array, into every parameter."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(read(name)))
