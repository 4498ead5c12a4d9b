"""Layers written in Python, which take the place of native ones in a model.

    class Gelu(pr.layers.Layer):
        def forward(self, call):
            return 0.5 * call.x * (1 + np.tanh(...))
        def backward_input(self, call):
            return call.dy * ...

    model = pr.models.GPT(layers=12, replace={"h.*.mlp.gelu": Gelu()})

A layer is a function of activations [rows, features], one token a row, in fp32. It has the methods of the native
ones (csrc/nn/layer.h): forward, backward_input, backward_weight, cost; its parameters are declared, so that ZeRO,
pipelines, checkpoints and `polyreme verify` treat them as all others. Arrays are NumPy's, views of the runtime's
memory; a method may return anything that speaks DLPack. It runs on the CPU, inside of the step, while it holds the GIL.

With lanes of tensor parallelism (pr.Lanes(tp=)) there are three kinds, with the same bits for every tp that divides them:

- A block or a norm without cut parameters computes all tokens, alike on every rank of tp; backward_weight is called on
  the first of them alone.
- One whose parameters are declared with cut="column" or "row" is column- and row-parallel: its methods are called for
  one lane, with the lane's part of those parameters and all of the others, and the runtime adds what the lanes return.
  So the layer has to be a sum over lanes: what is added once, such as the bias after a row-parallel product or a skip
  connection, belongs to call.lane 0. Gradients of parameters that are not cut are added over lanes too.
- A part of a block between the cuts ("mlp.gelu", "attn.heads") computes its lane's features, in and out; one that takes
  the place of a linear layer has cut parameters, "column" for "attn.qkv" or "mlp.fc", "row" for "attn.proj" or
  "mlp.proj", and is a sum over lanes on its uncut side.
"""

from __future__ import annotations

import fnmatch
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check_int, check_number, check_type
from .errors import InvalidArgument

__all__ = ["Call", "Layer", "Parameter", "TorchLayer"]

_CUTS = {None: -1, "column": 0, "row": 1}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a layer.

    shape: sizes of its dims.
    init: "zeros", "ones", or the standard deviation of a normal distribution.
    cut: how tensor parallelism may cut it: "column" along the first dim, "row" along the second; None: not. The lanes
        divide that dim.
    blocks: equal blocks of the cut dim of which a lane has its share each: 3 for a fused q, k and v.
    weight_decay: whether the optimizer's decay applies; None: from two dims on.
    """

    shape: tuple[int, ...]
    init: str | float = 0.02
    cut: str | None = None
    blocks: int = 1
    weight_decay: bool | None = None

    def __post_init__(self) -> None:
        sizes = tuple(check_int("Parameter: shape", size, 1) for size in self.shape)
        object.__setattr__(self, "shape", sizes)
        if self.init not in ("zeros", "ones"):
            init = check_number("Parameter: init", self.init, above=True, otherwise="'zeros' or 'ones'")
            object.__setattr__(self, "init", init)
        object.__setattr__(self, "blocks", check_int("Parameter: blocks", self.blocks, 1))
        if self.cut not in _CUTS or _CUTS[self.cut] >= len(sizes):
            raise InvalidArgument(
                f"Parameter: cut={self.cut!r} of shape {sizes}; expected None, 'column', or 'row' of two dims"
            )

    def _raw_init(self) -> float:
        return {"zeros": 0.0, "ones": -1.0}[self.init] if isinstance(self.init, str) else self.init


class Call:
    """What a layer's methods see of one micro-batch; the same object from its forward to its backward.

    x: the input [rows, features]. dy: the gradient of the output, in the backward methods. weights: the parameters by
        name, in forward and backward_input. grads: their gradients, in backward_weight: add to them in place, as one
        chain over tokens; those of frozen parameters are not there. All are the runtime's memory: only grads may be
        written.
    num_samples, seq_len: rows = num_samples * seq_len. first_sample: position in the global batch.
    lane, lanes: which lane of tensor parallelism it computes, of how many; 0 of 1 where it computes the whole.
    training, step, seed: for dropout and the like; draw from (seed, step, first_sample), never from a global state.

    Whatever else the backward needs may be stored as further attributes. In an evaluation no backward follows.
    """

    def __init__(
        self,
        num_samples: int,
        seq_len: int,
        training: bool,
        first_sample: int,
        step: int,
        seed: int,
        lane: int = 0,
        lanes: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.seq_len = seq_len
        self.training = training
        self.first_sample = first_sample
        self.step = step
        self.seed = seed
        self.lane = lane
        self.lanes = lanes
        self.x: NDArray[np.float32]
        self.dy: NDArray[np.float32]
        self.weights: dict[str, NDArray[np.float32]] = {}
        self.grads: dict[str, NDArray[np.float32]] = {}


class Layer(ABC):
    """A layer of one's own. Bits are equal over layouts if what it computes for a row does not depend on the rows that
    come with it, and backward_weight continues the sums in `grads` row by row; that is the layer's duty.
    """

    def parameters(self, inputs: int, outputs: int) -> Mapping[str, Parameter]:
        """Its parameters by name, for `inputs` and `outputs` features; default: none."""
        return {}

    @abstractmethod
    def forward(self, call: Call) -> Any:
        """The output [rows, outputs]."""

    @abstractmethod
    def backward_input(self, call: Call) -> Any:
        """The gradient of the input [rows, inputs], from call.dy."""

    def backward_weight(self, call: Call) -> None:
        """Adds to call.grads; after backward_input, in ascending order of micro-batches. Default: nothing to add."""
        return

    def cost(self, num_samples: int, seq_len: int) -> dict[str, float]:
        """FLOPs of a micro-batch over all lanes: forward_flops, backward_input_flops, backward_weight_flops; and
        saved_bytes, of what it stores in `call`. Pipelines split a model by them. Default: nothing.
        """
        return {}


class TorchLayer(Layer):
    """A PyTorch module from [rows, features] to [rows, features] as a layer. Its parameters become the runtime's, with
    initial values drawn anew like the module's: zeros, ones, or normal with their standard deviation. Zero-copy.

    make: makes the module, which has neither buffers nor random numbers. Called once.
    cut: "column" or "row" by the names of linear layers (torch.nn.Linear) of the module, for tensor parallelism: a
        column-parallel layer's outputs are a lane's, until a row-parallel one makes a sum over lanes of them, with
        which the module ends. Layers in front of the first column-parallel one compute alike in every lane.
    skip: y = x + module(x).

    Example:
        >>> import polyreme as pr
        >>> from torch import nn  # doctest: +SKIP
        >>> block = pr.layers.TorchLayer(lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))  # doctest: +SKIP
        >>> model = pr.models.GPT(layers=2, hidden=64, heads=4, replace={"h.1": block})  # doctest: +SKIP
    """

    def __init__(self, make: Any, *, cut: Mapping[str, str] | None = None, skip: bool = False) -> None:
        self._module = make()
        # A call puts its weights into the module: ranks of one process take turns.
        self._lock = threading.Lock()
        self._skip = skip
        self._shapes = {
            name.replace(".", "_"): (name, value) for name, value in self._module.named_parameters()
        }
        self._cuts: dict[str, str] = {}
        self._added_once: set[str] = set()  # biases of row-parallel layers
        for name, how in (cut or {}).items():
            self._cut(name, how)

    def _cut(self, name: str, how: str) -> None:
        from torch import nn

        layers = {path for path, module in self._module.named_modules() if isinstance(module, nn.Linear)}
        if name not in layers or how not in ("column", "row"):
            raise InvalidArgument(
                f"TorchLayer: cut={{{name!r}: {how!r}}}; expected 'column' or 'row' for linear layers, which are"
                f" {', '.join(sorted(layers)) or 'none here'}"
            )
        self._cuts[f"{name}.weight"] = how
        if how == "column":
            self._cuts[f"{name}.bias"] = how
        else:
            self._added_once.add(f"{name}.bias")

    def parameters(self, inputs: int, outputs: int) -> Mapping[str, Parameter]:
        """See Layer."""
        found = {}
        for name, (path, value) in self._shapes.items():
            data = value.detach()
            init: str | float = "zeros"
            if bool((data == 1).all()):
                init = "ones"
            elif bool((data != 0).any()):
                init = float(data.std(correction=0)) or "zeros"
            found[name] = Parameter(shape=tuple(data.shape), init=init, cut=self._cuts.get(path))
        return found

    def forward(self, call: Call) -> Any:
        """See Layer."""
        import torch

        x = torch.from_numpy(call.x).requires_grad_()
        weights = {
            path: torch.from_numpy(call.weights[name]).requires_grad_()
            for name, (path, _) in self._shapes.items()
        }
        with torch.enable_grad():
            used = dict(weights)
            if call.lane > 0:
                absent = self._added_once & weights.keys()
                used.update({path: torch.zeros_like(weights[path]) for path in absent})
            with self._lock:
                y = torch.func.functional_call(self._module, used, (x,))
            if self._skip and call.lane == 0:
                y = x + y
        call.graph = (x, weights, y)  # type: ignore[attr-defined]
        return y.detach()

    def backward_input(self, call: Call) -> Any:
        """See Layer; the gradients of the weights come with it, and wait for backward_weight."""
        import torch

        x, weights, y = call.graph  # type: ignore[attr-defined]
        dy = torch.from_numpy(call.dy)
        dx, *found = torch.autograd.grad(y, [x, *weights.values()], dy, materialize_grads=True)
        call.graph = dict(zip(self._shapes, found, strict=True))  # type: ignore[attr-defined]
        return dx

    def backward_weight(self, call: Call) -> None:
        """See Layer."""
        import torch

        for name, total in call.grads.items():
            torch.from_numpy(total).add_(call.graph[name])  # type: ignore[attr-defined]

    def cost(self, num_samples: int, seq_len: int) -> dict[str, float]:
        """Two operations for each token and element of a matrix, forward, and for each gradient."""
        matrices = sum(value.numel() for _, value in self._shapes.values() if value.dim() >= 2)
        flops = 2.0 * num_samples * seq_len * matrices
        return {f"{name}_flops": flops for name in ("forward", "backward_input", "backward_weight")}


class _Runner:
    """What the core calls for a layer at one or several places."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        kind = type(layer)
        self.description = f"{kind.__module__}.{kind.__qualname__}"
        self.cost = layer.cost

    def parameters(self, inputs: int, outputs: int) -> list[dict[str, Any]]:
        """As the core declares them."""
        found = []
        for name, parameter in self._layer.parameters(inputs, outputs).items():
            check_type(f"parameter {name!r}", parameter, Parameter, "a polyreme.layers.Parameter")
            found.append(
                {
                    "name": name,
                    "shape": parameter.shape,
                    "weight_decay": parameter.weight_decay,
                    "init": parameter._raw_init(),
                    "cut": _CUTS[parameter.cut],
                    "blocks": parameter.blocks,
                }
            )
        return found

    begin = Call

    def forward(self, call: Call, inputs: dict[str, Any], weights: dict[str, Any], out: Any) -> None:
        """Fills `out`."""
        call.x, call.weights = inputs["x"], weights
        _fill(out, self._layer.forward(call), "forward", self.description)
        call.weights = {}

    def backward_input(self, call: Call, inputs: dict[str, Any], weights: dict[str, Any], out: Any) -> None:
        """Fills `out`."""
        call.x, call.dy, call.weights = inputs["x"], inputs["dy"], weights
        _fill(out, self._layer.backward_input(call), "backward_input", self.description)
        call.weights = {}

    def backward_weight(self, call: Call, inputs: dict[str, Any], grads: dict[str, Any], out: Any) -> None:
        """Adds to `grads`."""
        call.x, call.dy, call.grads = inputs["x"], inputs["dy"], grads
        self._layer.backward_weight(call)
        call.grads = {}


def _fill(out: NDArray[np.float32], result: Any, method: str, layer: str) -> None:
    if not isinstance(result, np.ndarray) and hasattr(result, "__dlpack__"):
        result = np.from_dlpack(result)
    array = np.asarray(result)
    if array.shape != out.shape:
        raise InvalidArgument(
            f"{layer}: {method} returned {array.dtype}{list(array.shape)}; expected {list(out.shape)}"
        )
    np.copyto(out, array, casting="same_kind")


def runners(replace: Mapping[str, Layer] | None, places: list[str], family: str) -> dict[str, _Runner]:
    """By place, of patterns of places (as in fnmatch); the later pattern wins.

    Raises:
        InvalidArgument: a pattern without a place, or what is no layer.
    """
    found: dict[str, _Runner] = {}
    for pattern, layer in (replace or {}).items():
        check_type(f"{family}: replace", pattern, str, "patterns of places, such as 'h.*.mlp.gelu'")
        check_type(f"{family}: replace[{pattern!r}]", layer, Layer, "a polyreme.layers.Layer")
        matching = fnmatch.filter(places, pattern)
        if not matching:
            own = [place for place in places if not place.startswith("h.") or place.startswith("h.0")]
            raise InvalidArgument(
                f"{family}: replace: no place matches {pattern!r}; places are {', '.join(own)}"
            )
        runner = _Runner(layer)
        for place in matching:
            found[place] = runner
    return found
