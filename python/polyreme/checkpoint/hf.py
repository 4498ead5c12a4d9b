"""GPT-2 and Llama weights in and out of the files of Hugging Face's transformers.

A folder with config.json and model.safetensors, or several files and model.safetensors.index.json. Linear weights are
[out, in] here; in GPT-2's files (Conv1D) they are [in, out]. Tied heads are not in the files. Llama's fused
projections are, for each head of keys and values, its query heads, then k, then v; and gate, then up.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core, models
from ..errors import CheckpointCorrupt, CheckpointError, InvalidArgument
from .convert import write_safetensors
from .directory import complete_steps
from .loader import CheckpointFiles
from .manifest import SHARD_DTYPES, TensorRecord, encode_json

__all__ = ["export_hf", "import_hf", "read_hf"]

Weights = dict[str, NDArray[np.float32]]
Rename = Callable[[Mapping[str, Any], Weights], Weights]

_MAX_JSON_BYTES = 64 << 20
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# Buffers that old files have beside the weights.
_NO_WEIGHT = re.compile(r"\.attn\.(bias|masked_bias)\Z|\.rotary_emb\.inv_freq\Z")


# ---- GPT-2 ----

_GPT_BLOCK = (
    ("ln_1", "ln_1", False),
    ("attn.qkv", "attn.c_attn", True),
    ("attn.proj", "attn.c_proj", True),
    ("ln_2", "ln_2", False),
    ("mlp.fc", "mlp.c_fc", True),
    ("mlp.proj", "mlp.c_proj", True),
)


def _gpt_names(model: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """(ours, theirs, transposed) of all parameters."""
    names = [("wte.weight", "transformer.wte.weight", False), ("wpe.weight", "transformer.wpe.weight", False)]
    for i in range(model["layers"]):
        for own, other, is_linear in _GPT_BLOCK:
            for part in ("weight", "bias"):
                names.append(
                    (
                        f"h.{i}.{own}.{part}",
                        f"transformer.h.{i}.{other}.{part}",
                        is_linear and part == "weight",
                    )
                )
    names += [(f"ln_f.{part}", f"transformer.ln_f.{part}", False) for part in ("weight", "bias")]
    if not model["tied"]:
        names.append(("lm_head.weight", "lm_head.weight", False))
    return names


def _gpt_out(model: Mapping[str, Any], own: Weights) -> Weights:
    return {b: own[a].T if transposed else own[a] for a, b, transposed in _gpt_names(model)}


def _gpt_in(model: Mapping[str, Any], other: Weights) -> Weights:
    # Files of the bare model have no "transformer." in front.
    prefix = "" if "wte.weight" in other else "transformer."
    result = {}
    for a, b, transposed in _gpt_names(model):
        array = other[b.replace("transformer.", prefix, 1)]
        result[a] = array.T if transposed else array
    return result


def _gpt_config(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": model["layers"],
        "n_embd": model["hidden"],
        "n_head": model["heads"],
        "n_inner": model.get("mlp_hidden"),
        "n_positions": model["seq_len"],
        "vocab_size": model["vocab"],
        "layer_norm_epsilon": model["layer_norm_eps"],
        "tie_word_embeddings": model["tied"],
        "resid_pdrop": model["dropout"],
        "embd_pdrop": model["dropout"],
        "attn_pdrop": 0.0,
        "initializer_range": model["init_std"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt_model(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise InvalidArgument(
            f"activation_function is {config['activation_function']!r}; GPT has the tanh form of GELU"
        )
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "vocab": config["vocab_size"],
        "seq_len": config["n_positions"],
        "mlp_hidden": config.get("n_inner"),
        "layer_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tied": config.get("tie_word_embeddings", True),
    }


# ---- Llama ----


def _head_dim(model: Mapping[str, Any]) -> int:
    return int(model["hidden"] // model["heads"])


def _llama_out(model: Mapping[str, Any], own: Weights) -> Weights:
    kv_heads = model.get("kv_heads") or model["heads"]
    queries, dim = model["heads"] // kv_heads, _head_dim(model)
    result = {"model.embed_tokens.weight": own["wte.weight"], "model.norm.weight": own["ln_f.weight"]}
    for i in range(model["layers"]):
        a, b = f"h.{i}.", f"model.layers.{i}."
        fused = own[a + "attn.qkv.weight"]
        grouped = fused.reshape(kv_heads, queries + 2, dim, fused.shape[1])
        for name, part in (
            ("q", grouped[:, :queries]),
            ("k", grouped[:, queries]),
            ("v", grouped[:, queries + 1]),
        ):
            result[f"{b}self_attn.{name}_proj.weight"] = part.reshape(-1, fused.shape[1])
        gate, up = np.split(own[a + "mlp.gate_up.weight"], 2)
        result |= {
            b + "input_layernorm.weight": own[a + "ln_1.weight"],
            b + "self_attn.o_proj.weight": own[a + "attn.proj.weight"],
            b + "post_attention_layernorm.weight": own[a + "ln_2.weight"],
            b + "mlp.gate_proj.weight": gate,
            b + "mlp.up_proj.weight": up,
            b + "mlp.down_proj.weight": own[a + "mlp.down.weight"],
        }
    if not model["tied"]:
        result["lm_head.weight"] = own["lm_head.weight"]
    return result


def _llama_in(model: Mapping[str, Any], other: Weights) -> Weights:
    kv_heads = model.get("kv_heads") or model["heads"]
    dim, hidden = _head_dim(model), model["hidden"]
    result = {"wte.weight": other["model.embed_tokens.weight"], "ln_f.weight": other["model.norm.weight"]}
    for i in range(model["layers"]):
        a, b = f"h.{i}.", f"model.layers.{i}."
        parts = [other[f"{b}self_attn.{n}_proj.weight"].reshape(kv_heads, -1, dim, hidden) for n in "qkv"]
        result |= {
            a + "ln_1.weight": other[b + "input_layernorm.weight"],
            a + "attn.qkv.weight": np.concatenate(parts, axis=1).reshape(-1, hidden),
            a + "attn.proj.weight": other[b + "self_attn.o_proj.weight"],
            a + "ln_2.weight": other[b + "post_attention_layernorm.weight"],
            a + "mlp.gate_up.weight": np.concatenate(
                [other[f"{b}mlp.{n}_proj.weight"] for n in ("gate", "up")]
            ),
            a + "mlp.down.weight": other[b + "mlp.down_proj.weight"],
        }
    if not model["tied"]:
        result["lm_head.weight"] = other["lm_head.weight"]
    return result


def _llama_config(model: Mapping[str, Any]) -> dict[str, Any]:
    hidden = model["hidden"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": model["layers"],
        "hidden_size": hidden,
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model.get("kv_heads") or model["heads"],
        "intermediate_size": model.get("mlp_hidden") or ((8 * hidden + 2) // 3 + 63) // 64 * 64,
        "max_position_embeddings": model["seq_len"],
        "vocab_size": model["vocab"],
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "tie_word_embeddings": model["tied"],
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": model["init_std"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_model(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise InvalidArgument(f"rotary positions are scaled ({rope}); Llama here has the plain ones")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise InvalidArgument("the linear layers have biases; Llama here has none")
    heads = config["num_attention_heads"]
    if config.get("head_dim") not in (None, config["hidden_size"] // heads):
        raise InvalidArgument(f"head_dim is {config['head_dim']}; expected hidden_size / num_attention_heads")
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "mlp_hidden": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "seq_len": config["max_position_embeddings"],
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": config.get("tie_word_embeddings", False),
    }


# kind of ours: (model_type of theirs, weights out, weights in, config out, arguments of the model in)
_FAMILIES: dict[str, tuple[str, Rename, Rename, Any, Any]] = {
    "GPT": ("gpt2", _gpt_out, _gpt_in, _gpt_config, _gpt_model),
    "Llama": ("llama", _llama_out, _llama_in, _llama_config, _llama_model),
}


# ---- files ----


def export_hf(
    files: CheckpointFiles, out: str | os.PathLike[str], *, shard_bytes: int = 5 << 30
) -> list[str]:
    """Writes the weights of a Trainer's checkpoint as a new folder that transformers loads; returns its files.

        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained("exported")

    Raises:
        CheckpointError: not the checkpoint of a Trainer, or the folder exists.
    """
    model = files.manifest.state.get("model")
    if not isinstance(model, dict) or model.get("kind") not in _FAMILIES:
        raise CheckpointError(
            f"'{files.path}' does not say of which model it is; expected one of {list(_FAMILIES)}"
        )
    _, rename, _, config_of, _ = _FAMILIES[model["kind"]]
    weights: Weights = {}
    for name, record in files.manifest.tensors.items():
        if name.startswith("model/"):
            weights[name[len("model/") :]] = _as_float32(
                files.read_tensor(name), SHARD_DTYPES[record.dtype]
            ).reshape(record.shape)
    renamed = {name: np.ascontiguousarray(array) for name, array in rename(model, weights).items()}
    folder = os.path.abspath(os.fspath(out))
    if os.path.lexists(folder):
        raise CheckpointError(f"'{folder}' exists already; choose the name of a new folder")
    parent, name = os.path.split(folder)
    try:
        os.makedirs(parent, exist_ok=True)
        # Appears under its name only when it is whole.
        temporary = os.path.join(parent, f".{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        os.mkdir(temporary)
    except OSError as error:
        raise CheckpointError(
            f"'{folder}' cannot be made: {error}; choose the name of a new folder"
        ) from error
    try:
        written = _write_folder(temporary, renamed, config_of(model), shard_bytes)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _core.FileOps().sync_directory(parent)
    return written


def _write_folder(folder: str, weights: Weights, config: dict[str, Any], shard_bytes: int) -> list[str]:
    """The files of transformers in an empty folder; their names."""
    groups: list[list[str]] = [[]]
    for name, array in weights.items():
        if groups[-1] and sum(weights[n].nbytes for n in groups[-1]) + array.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(name)
    written: list[str] = []
    places: dict[str, str] = {}
    for i, group in enumerate(groups):
        file = (
            "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        )
        tensors = {
            n: (TensorRecord("float32", weights[n].shape), weights[n].reshape(-1).view(np.uint8))
            for n in group
        }
        write_safetensors(os.path.join(folder, file), tensors, {"format": "pt"})
        places |= dict.fromkeys(group, file)
        written.append(file)
    documents = {"config.json": {**config, "dtype": "float32"}}
    if len(groups) > 1:
        size = sum(array.nbytes for array in weights.values())
        documents["model.safetensors.index.json"] = {"metadata": {"total_size": size}, "weight_map": places}
    changes = _core.FileOps()
    for file, document in documents.items():
        changes.write_file(folder, file, encode_json(file, document) + b"\n")
        written.append(file)
    changes.sync_directory(folder)
    return sorted(written)


def read_hf(folder: str | os.PathLike[str]) -> tuple[models.GPT, Weights]:
    """The model that a folder of transformers describes, and its weights under our names, as float32.

    Raises:
        CheckpointError: a family that we do not have, missing weights, damaged files.
    """
    path = os.fspath(folder)
    if not os.path.isdir(path):
        raise CheckpointError(
            f"'{path}' is no folder; expected one of transformers, with config.json and weights"
        )
    config = _read_json(path, "config.json")
    for kind, (model_type, _, rename, _, arguments_of) in _FAMILIES.items():
        if config.get("model_type") == model_type and hasattr(models, kind):
            try:
                arguments = arguments_of(config)
                model = getattr(models, kind)(**arguments)
                weights = rename(arguments, _read_tensors(path))
            except KeyError as error:
                raise CheckpointError(f"'{path}' lacks {error}") from None
            break
    else:
        raise CheckpointError(
            f"'{path}' is a model of type {config.get('model_type')!r}; expected gpt2 or llama"
        )
    for spec in model.param_specs():
        shape = weights[spec["name"]].shape
        if shape != tuple(spec["shape"]):
            raise CheckpointError(
                f"'{path}': {spec['name']!r} has the shape {shape}; its config says {spec['shape']}"
            )
    return model, weights


def import_hf(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> models.GPT | models.Llama:
    """Makes a checkpoint of step 0 of a folder of transformers; returns its model.

    Raises CheckpointError if `out` has checkpoints; nothing is changed then.

    model = import_hf("gpt2", "runs/gpt2")
    trainer = pr.Trainer(model, mesh, ...)
    pr.Checkpointer("runs/gpt2").load(trainer, weights_only=True)
    """
    from ..environment import RankEnvironment
    from ..world import init
    from .checkpointer import Checkpointer

    there = complete_steps(out)
    if there:
        raise CheckpointError(
            f"'{os.fspath(out)}' has checkpoints, of the steps {there[-8:]}; import into a new directory"
        )
    model, weights = read_hf(folder)
    state = {f"model/{name}": np.ascontiguousarray(array) for name, array in weights.items()}
    with Checkpointer(out, world=init(environment=RankEnvironment()), signals=False) as checkpoints:
        checkpoints.save(
            state, step=0, extras={"imported_from": os.path.basename(os.path.abspath(os.fspath(folder)))}
        )
    return model


def _read_json(folder: str, name: str) -> dict[str, Any]:
    try:
        document = json.loads(_core.read_flat_file(folder, name, _MAX_JSON_BYTES))
    except ValueError as error:
        raise CheckpointCorrupt(f"'{folder}/{name}' is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointCorrupt(f"'{folder}/{name}' is no JSON object")
    return document


def _read_tensors(folder: str) -> Weights:
    if os.path.lexists(os.path.join(folder, "model.safetensors.index.json")):
        places = _read_json(folder, "model.safetensors.index.json").get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointCorrupt(f"'{folder}/model.safetensors.index.json' has no weight_map")
        names = sorted(set(places.values()))
    else:
        names = ["model.safetensors"]
    weights: Weights = {}
    for name in names:
        file = _core.ShardFile(folder, name)
        for entry, dtype, shape, begin, end in file.entries:
            if _NO_WEIGHT.search(entry):
                continue
            data = np.empty(end - begin, np.uint8)
            file.read(np.array([[begin, end - begin, 0]]), data)
            weights[entry] = _as_float32(data, dtype).reshape(shape)
    return weights


def _as_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype not in _DTYPES:
        raise CheckpointError(f"a weight is stored as {dtype}; expected BF16, F16, F32 or F64")
    result: NDArray[np.float32] = data.view(_DTYPES[dtype]).astype(np.float32)
    return result
