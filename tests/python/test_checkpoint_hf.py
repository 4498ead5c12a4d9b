"""Weights in and out of transformers: the same logits in both directions."""

from __future__ import annotations

import json
import os
import resource

import numpy as np
import polyreme as pr
import pytest
from helpers import alone, refused
from polyreme.checkpoint import CheckpointFiles, export_hf, import_hf, read_hf
from polyreme.cli.main import main

pytestmark = [pytest.mark.torch, pytest.mark.slow]
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

GPT = dict(layers=2, hidden=32, heads=4, vocab=61, seq_len=24)
LLAMA = dict(layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, vocab=61, seq_len=24)
TOKENS = np.random.default_rng(0).integers(0, 61, (3, 24)).astype(np.int32)


def make(kind, **options):
    if not hasattr(pr.models, kind):
        pytest.skip(f"no {kind} in this version")
    return getattr(pr.models, kind)(**{**(GPT if kind == "GPT" else LLAMA), **options})


def trainer_of(model):
    trainer = pr.Trainer(model, pr.Mesh(alone()), optimizer=pr.AdamW(lr=1e-3), global_batch=4, seed=5)
    random = np.random.default_rng(1)
    for spec in model.param_specs():  # no zeros and ones, behind which mistakes hide
        trainer.set_parameter(spec["name"], random.standard_normal(spec["shape"]) * 0.2)
    return trainer


def their_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


CASES = [
    ("GPT", dict(tied=True)),
    ("GPT", dict(tied=False, mlp_hidden=40)),
    ("Llama", dict()),
    ("Llama", dict(tied=True, kv_heads=4)),
]


@pytest.mark.parametrize("kind, options", CASES)
@pytest.mark.parametrize("shard_bytes", [5 << 30, 9000])
def test_out(tmp_path, kind, options, shard_bytes):
    trainer = trainer_of(make(kind, **options))
    with pr.Checkpointer(tmp_path / "own") as checkpoints:
        checkpoints.save(trainer)
    written = export_hf(CheckpointFiles(str(tmp_path / "own"), 0), tmp_path / "hf", shard_bytes=shard_bytes)
    assert ("model.safetensors.index.json" in written) == (shard_bytes == 9000)
    np.testing.assert_allclose(trainer.logits(TOKENS), their_logits(tmp_path / "hf"), atol=1e-4)
    # And back, through the command line: the same bits.
    assert (
        main(["ckpt", "import", str(tmp_path / "hf"), "--from", "hf", "--out", str(tmp_path / "again")]) == 0
    )
    assert main(["ckpt", "import", str(tmp_path / "hf"), "--from", "hf", "--out", str(tmp_path / "own")]) == 2
    again = trainer_of(make(kind, **options))
    with pr.Checkpointer(tmp_path / "again") as checkpoints:
        checkpoints.load(again, weights_only=True)
    for name in trainer.parameter_names():
        assert trainer.parameter(name).tobytes() == again.parameter(name).tobytes(), name


def test_an_export_that_fails_leaves_nothing(tmp_path):
    with pr.Checkpointer(tmp_path / "own") as checkpoints:
        checkpoints.save(trainer_of(make("GPT")))
    files = CheckpointFiles(str(tmp_path / "own"), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))  # as a disk that is full after some files
    try:
        refused(
            pr.CheckpointError, [".safetensors"], lambda: export_hf(files, tmp_path / "hf", shard_bytes=4000)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["own"]
    export_hf(files, tmp_path / "hf")
    refused(pr.CheckpointError, ["exists already"], lambda: export_hf(files, tmp_path / "hf"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gpt2_in(tmp_path, dtype):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=24, initializer_range=0.3
    )
    theirs = transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "hf")
    model = import_hf(tmp_path / "hf", tmp_path / "own")
    trainer = pr.Trainer(model, pr.Mesh(alone()), optimizer=pr.AdamW(lr=1e-3), global_batch=4)
    with pr.Checkpointer(tmp_path / "own") as checkpoints:
        checkpoints.load(trainer, weights_only=True)
    np.testing.assert_allclose(trainer.logits(TOKENS), their_logits(tmp_path / "hf"), atol=1e-4)


def test_llama_in(tmp_path):
    make("Llama")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61, max_position_embeddings=24, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    trainer = pr.Trainer(
        import_hf(tmp_path / "hf", tmp_path / "own"),
        pr.Mesh(alone()),
        optimizer=pr.AdamW(lr=1e-3),
        global_batch=4,
    )
    with pr.Checkpointer(tmp_path / "own") as checkpoints:
        checkpoints.load(trainer, weights_only=True)
    np.testing.assert_allclose(trainer.logits(TOKENS), their_logits(tmp_path / "hf"), atol=1e-4)


def test_refusals(tmp_path):
    (tmp_path / "file").write_text("")
    refused(pr.CheckpointError, ["is no folder", "config.json"], lambda: read_hf(tmp_path / "file"))
    os.makedirs(tmp_path / "hf")
    refused(pr.CheckpointCorrupt, ["config.json", "missing"], lambda: read_hf(tmp_path / "hf"))
    config = {"model_type": "bert"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    refused(pr.CheckpointError, ["bert", "gpt2 or llama"], lambda: read_hf(tmp_path / "hf"))
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    refused(pr.CheckpointError, ["vocab_size"], lambda: read_hf(tmp_path / "hf"))
    with pr.Checkpointer(tmp_path / "own", world=alone()) as checkpoints:
        checkpoints.save({"w": np.zeros(3)}, step=1)
    files = CheckpointFiles(str(tmp_path / "own"), 1)
    refused(pr.CheckpointError, ["of which model"], lambda: export_hf(files, tmp_path / "out"))
