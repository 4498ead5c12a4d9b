"""Models by configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _core
from .checks import check_int, check_number, check_type
from .errors import InvalidArgument
from .precision import Precision

__all__ = ["GPT"]


@dataclass(frozen=True, kw_only=True)
class GPT:
    """The GPT-2 family: learned positions, pre-LayerNorm blocks, GELU (tanh form).

    layers, hidden, heads: the size; heads must divide hidden.
    vocab: number of tokens.
    seq_len: longest sequence, in tokens.
    mlp_hidden: default 4 * hidden.
    dropout: probability, after the embedding and at the end of both branches of a block.
    tied: head and token embedding are one parameter.
    recompute: keep only the input of each block for backward; less memory, a third more arithmetic,
        the same bits.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocab: int = 50304
    seq_len: int = 1024
    mlp_hidden: int | None = None
    dropout: float = 0.0
    tied: bool = True
    layer_norm_eps: float = 1e-5
    init_std: float = 0.02
    recompute: bool = False

    def __post_init__(self) -> None:
        def store(name: str, value: int | float) -> None:
            object.__setattr__(self, name, value)  # as a plain int or float, whatever type came

        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            store(name, check_int(f"GPT: {name}", getattr(self, name), 1))
        if self.mlp_hidden is not None:
            store(
                "mlp_hidden",
                check_int("GPT: mlp_hidden", self.mlp_hidden, 1, otherwise="None for 4 * hidden"),
            )
        for name in ("tied", "recompute"):
            check_type(f"GPT: {name}", getattr(self, name), bool, "True or False")
        if self.hidden % self.heads:
            raise InvalidArgument(
                f"GPT: hidden={self.hidden} is not divisible by heads={self.heads}; choose heads that divide hidden"
            )
        store("dropout", check_number("GPT: dropout", self.dropout, high=1.0))
        store("layer_norm_eps", check_number("GPT: layer_norm_eps", self.layer_norm_eps, above=True))
        store("init_std", check_number("GPT: init_std", self.init_std))

    def _config(self, precision: str | Precision = "fp32") -> _core.GptConfig:
        return _core.GptConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=self.vocab,
            seq_len=self.seq_len,
            mlp_hidden=self.mlp_hidden or 0,
            dropout=self.dropout,
            tied=self.tied,
            layer_norm_eps=self.layer_norm_eps,
            init_std=self.init_std,
            recompute=self.recompute,
            **Precision.of(precision)._dtypes(),
        )

    def param_specs(self, precision: str | Precision = "fp32") -> list[dict[str, Any]]:
        """Every parameter in order: name, shape, dtype, tie_group, weight_decay, cuts."""
        return _core.gpt_param_specs(self._config(precision))

    def cost(
        self, num_samples: int = 1, seq_len: int | None = None, precision: str | Precision = "fp32"
    ) -> dict[str, float]:
        """FLOPs and bytes of one micro-batch; a fused multiply-add counts 2."""
        return _core.gpt_cost(self._config(precision), num_samples, seq_len or self.seq_len)

    def flops_per_token(self) -> float:
        """Model FLOPs of training on one token: 3 x forward, recomputation not counted."""
        return 3 * self.cost(1)["forward_flops"] / self.seq_len

    def gemm_shapes(self, num_samples: int) -> list[tuple[str, int, int, int, bool, bool, int]]:
        """The matrix products of one micro-batch: (name, m, n, k, transpose_a, transpose_b, count)."""
        rows = num_samples * self.seq_len
        mlp = self.mlp_hidden or 4 * self.hidden
        linears = [
            ("qkv", self.hidden, 3 * self.hidden, self.layers),
            ("proj", self.hidden, self.hidden, self.layers),
            ("fc", self.hidden, mlp, self.layers),
            ("mlp", mlp, self.hidden, self.layers),
            ("head", self.hidden, self.vocab, 1),
        ]
        shapes = []
        for name, inputs, outputs, count in linears:
            shapes.append((f"{name} forward", rows, outputs, inputs, False, True, count))
            shapes.append((f"{name} backward input", rows, inputs, outputs, False, False, count))
            shapes.append((f"{name} backward weight", outputs, inputs, rows, True, False, count))
        return shapes
