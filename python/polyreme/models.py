"""Models by configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from . import _core
from .checks import check_int, check_number, check_type
from .errors import InvalidArgument
from .layers import Layer, runners
from .precision import Precision

__all__ = ["GPT", "Llama", "Model"]

_RECOMPUTE: dict[bool | str, str] = {False: "none", True: "blocks", "attention": "attention"}


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """What the families of models share. `layers` blocks of width `hidden`, trained on sequences of up to `seq_len`
    tokens out of `vocab`."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    recompute: bool | str = False
    replace: Mapping[str, Layer] | None = None

    @abstractmethod
    def _config(self, precision: str | Precision = "fp32") -> Any: ...

    @abstractmethod
    def _linears(self) -> list[tuple[str, int, int, int]]:
        """(name, inputs, outputs, count) of all linear layers."""

    def _store(self, name: str, value: int | float) -> None:
        object.__setattr__(self, name, value)  # as a plain int or float, whatever type came

    @abstractmethod
    def _parts(self) -> tuple[str, ...]:
        """The places of a block."""

    def _facts(self) -> dict[str, Any]:
        """The configuration as numbers and texts."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        own = self._runners().items()
        return {**facts, "replace": {place: runner.description for place, runner in own} or None}

    def _runners(self) -> dict[str, Any]:
        blocks = [f"h.{index}" for index in range(self.layers)]
        parts = [f"{block}.{part}" for block in blocks for part in self._parts()]
        return runners(self.replace, [*blocks, *parts, "ln_f"], type(self).__name__)

    def _check_recompute(self, family: str) -> None:
        value = self.recompute
        if not isinstance(value, bool) and value != "attention":
            raise InvalidArgument(
                f"{family}: recompute is {value!r} ({type(value).__name__}); expected True, False or 'attention'"
            )

    def _check_heads(self, family: str) -> None:
        if self.hidden % self.heads:
            raise InvalidArgument(
                f"{family}: hidden={self.hidden} is not divisible by heads={self.heads}; choose heads that divide"
                " hidden"
            )

    def param_specs(self, precision: str | Precision = "fp32") -> list[dict[str, Any]]:
        """Every parameter in order: name, shape, dtype, tie_group, weight_decay, cuts."""
        return _core.model_param_specs(self._config(precision))

    def cost(
        self,
        num_samples: int = 1,
        seq_len: int | None = None,
        precision: str | Precision = "fp32",
        *,
        tp: int = 1,
        lanes_tp: int | None = None,
    ) -> dict[str, float]:
        """FLOPs and bytes of one micro-batch on one rank of tp; a fused multiply-add counts 2. `comm_bytes` is what
        the rank sends to others of tp in a forward.

        Raises:
            InvalidArgument: a size that the lanes do not divide; names it and the rule.
        """
        lanes = lanes_tp or tp
        return _core.model_cost(self._config(precision), num_samples, seq_len or self.seq_len, tp, lanes)

    def flops_per_token(self) -> float:
        """Model FLOPs of training on one token: 3 x forward, recomputation not counted."""
        return 3 * self.cost(1)["forward_flops"] / self.seq_len

    def gemm_shapes(self, num_samples: int) -> list[tuple[str, int, int, int, bool, bool, int]]:
        """The matrix products of one micro-batch: (name, m, n, k, transpose_a, transpose_b, count)."""
        rows = num_samples * self.seq_len
        shapes = []
        for name, inputs, outputs, count in self._linears():
            shapes.append((f"{name} forward", rows, outputs, inputs, False, True, count))
            shapes.append((f"{name} backward input", rows, inputs, outputs, False, False, count))
            shapes.append((f"{name} backward weight", outputs, inputs, rows, True, False, count))
        return shapes


@dataclass(frozen=True, kw_only=True)
class GPT(Model):
    """The GPT-2 family: learned positions, pre-LayerNorm blocks, GELU (tanh form).

    layers, hidden, heads: the size; heads must divide hidden.
    vocab: number of tokens.
    seq_len: longest sequence, in tokens.
    mlp_hidden: default 4 * hidden.
    dropout: probability, after the embedding and at the end of both branches of a block.
    tied: head and token embedding are one parameter.
    recompute: what backward computes again instead of keeping it; the same bits. True: all but the input of each
        block; least memory, a third more arithmetic. "attention": queries, keys and values and the attention over
        them (selective recomputation); a fifth less memory for less than half of that arithmetic.
    replace: layers of one's own (polyreme.layers.Layer) by patterns of the places that they take, as in fnmatch: whole
        blocks "h.0", parts of them "h.*.ln_1", ".ln_2", ".attn.qkv", ".attn.heads", ".attn.proj", ".mlp.fc", ".mlp.gelu",
        ".mlp.proj", the last norm "ln_f". Not with tensor
        parallelism.
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
    recompute: bool | str = False
    replace: Mapping[str, Layer] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            self._store(name, check_int(f"GPT: {name}", getattr(self, name), 1))
        if self.mlp_hidden is not None:
            self._store(
                "mlp_hidden",
                check_int("GPT: mlp_hidden", self.mlp_hidden, 1, otherwise="None for 4 * hidden"),
            )
        check_type("GPT: tied", self.tied, bool, "True or False")
        self._check_recompute("GPT")
        self._check_heads("GPT")
        self._store("dropout", check_number("GPT: dropout", self.dropout, high=1.0))
        self._store("layer_norm_eps", check_number("GPT: layer_norm_eps", self.layer_norm_eps, above=True))
        self._store("init_std", check_number("GPT: init_std", self.init_std))

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
            recompute=_RECOMPUTE[self.recompute],
            **Precision.of(precision)._dtypes(),
            replace=self._runners(),
        )

    def _parts(self) -> tuple[str, ...]:
        return ("ln_1", "attn.qkv", "attn.heads", "attn.proj", "ln_2", "mlp.fc", "mlp.gelu", "mlp.proj")

    def _linears(self) -> list[tuple[str, int, int, int]]:
        mlp = self.mlp_hidden or 4 * self.hidden
        return [
            ("qkv", self.hidden, 3 * self.hidden, self.layers),
            ("proj", self.hidden, self.hidden, self.layers),
            ("fc", self.hidden, mlp, self.layers),
            ("mlp", mlp, self.hidden, self.layers),
            ("head", self.hidden, self.vocab, 1),
        ]


@dataclass(frozen=True, kw_only=True)
class Llama(Model):
    """The Llama family: rotary positions, RMSNorm before each branch, grouped-query attention, SwiGLU, no biases.

    layers, hidden, heads: the size; heads must divide hidden, into heads of an even size.
    kv_heads: heads of keys and values, each for heads / kv_heads query heads; default: heads.
    mlp_hidden: default 8/3 * hidden, rounded up to a multiple of 64.
    vocab: number of tokens.
    seq_len: longest sequence, in tokens.
    rope_theta: base of the rotary wavelengths.
    tied: head and token embedding are one parameter.
    recompute: what backward computes again instead of keeping it; the same bits. True: all but the input of each
        block; least memory, a third more arithmetic. "attention": queries, keys and values and the attention over
        them (selective recomputation); a fifth less memory for less than half of that arithmetic.
    replace: layers of one's own (polyreme.layers.Layer) by patterns of the places that they take, as in fnmatch: whole
        blocks "h.0", parts of them "h.*.ln_1", ".ln_2", ".attn.qkv", ".attn.heads", ".attn.proj", ".mlp.gate_up",
        ".mlp.swiglu", ".mlp.down", the last norm "ln_f". Not with tensor
        parallelism.

    Example:
        >>> pr.models.Llama(layers=6, hidden=768, heads=12, kv_heads=4, vocab=32000, seq_len=1024)
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int | None = None
    mlp_hidden: int | None = None
    vocab: int = 32000
    seq_len: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied: bool = False
    recompute: bool | str = False
    replace: Mapping[str, Layer] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            self._store(name, check_int(f"Llama: {name}", getattr(self, name), 1))
        for name, default in (("kv_heads", "None for heads"), ("mlp_hidden", "None for 8/3 * hidden")):
            if getattr(self, name) is not None:
                self._store(name, check_int(f"Llama: {name}", getattr(self, name), 1, otherwise=default))
        check_type("Llama: tied", self.tied, bool, "True or False")
        self._check_recompute("Llama")
        self._check_heads("Llama")
        if self.hidden // self.heads % 2:
            raise InvalidArgument(
                f"Llama: hidden={self.hidden} / heads={self.heads} is an odd head size; rotary positions need an even"
                " one"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise InvalidArgument(
                f"Llama: heads={self.heads} is not divisible by kv_heads={self.kv_heads}; choose kv_heads that divide"
                " heads"
            )
        self._store("rope_theta", check_number("Llama: rope_theta", self.rope_theta, 1.0))
        self._store("norm_eps", check_number("Llama: norm_eps", self.norm_eps, above=True))
        self._store("init_std", check_number("Llama: init_std", self.init_std))

    @property
    def _mlp(self) -> int:
        return self.mlp_hidden or ((8 * self.hidden + 2) // 3 + 63) // 64 * 64

    def _config(self, precision: str | Precision = "fp32") -> _core.LlamaConfig:
        return _core.LlamaConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            mlp_hidden=self._mlp,
            vocab=self.vocab,
            seq_len=self.seq_len,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            init_std=self.init_std,
            tied=self.tied,
            recompute=_RECOMPUTE[self.recompute],
            **Precision.of(precision)._dtypes(),
            replace=self._runners(),
        )

    def _parts(self) -> tuple[str, ...]:
        return (
            "ln_1",
            "attn.qkv",
            "attn.heads",
            "attn.proj",
            "ln_2",
            "mlp.gate_up",
            "mlp.swiglu",
            "mlp.down",
        )

    def _linears(self) -> list[tuple[str, int, int, int]]:
        head_dim = self.hidden // self.heads
        qkv = (self.heads + 2 * (self.kv_heads or self.heads)) * head_dim
        return [
            ("qkv", self.hidden, qkv, self.layers),
            ("proj", self.hidden, self.hidden, self.layers),
            ("gate_up", self.hidden, 2 * self._mlp, self.layers),
            ("down", self._mlp, self.hidden, self.layers),
            ("head", self.hidden, self.vocab, 1),
        ]
