"""The Trainer along pp: any schedule, split and size gives the bits of one rank."""

from __future__ import annotations

import functools
import os

import numpy as np
import polyreme as pr
import pytest
from helpers import batches, fingerprint, polyreme, refused, token_file
from polyreme.testing import run_ranks

MODEL = pr.models.Llama(layers=6, hidden=16, heads=2, kv_heads=1, vocab=31, seq_len=12)
DATA = batches(3, 16, MODEL, ignored=0.1)
GPT = pr.models.GPT(layers=5, hidden=16, heads=2, vocab=31, seq_len=12, tied=False, dropout=0.1)

KINDS = {
    "gpipe": pr.schedule.gpipe(),
    "one_f_one_b": pr.schedule.one_f_one_b(),
    "interleaved": pr.schedule.interleaved(2),
    "zb_h1": pr.schedule.zb_h1(),
    "zb_v": pr.schedule.zb_v(),
    "dual_pipe_v": pr.schedule.dual_pipe_v(),
}


def train(world, pp, *, model=MODEL, data=DATA, **options):
    """Losses, norms, the fingerprint of all weights and state, and logits."""
    mesh = pr.Mesh(world, pp=pp)
    options = {"global_batch": 16, "clip_norm": 0.5, "lanes": pr.Lanes(dp=4), **options}
    trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(lr=1e-3, eps=1e-4, weight_decay=0.1), **options)
    dp, place = mesh.size("dp"), mesh.coordinate("dp")
    history = []
    for tokens, targets in data:
        count = len(tokens) // dp
        part = slice(place * count, (place + 1) * count)
        stats = trainer.step(tokens[part], targets[part])
        history.append((stats.loss.hex(), stats.grad_norm.hex(), stats.valid_tokens))
    logits = trainer.logits(data[0][0][:2, :7])
    return history, fingerprint(trainer), logits.tobytes(), trainer.num_parameters


@functools.cache
def one_rank(model=MODEL):
    return run_ranks(1, lambda world: train(world, 1, model=model))[0]


def many(ranks, pp, *, executor="immediate", seed=0, **options):
    results = run_ranks(
        ranks, lambda world: train(world, pp, **options), executor=executor, schedule_seed=seed
    )
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_has_the_bits_of_one_rank(kind, pp):
    chunks = KINDS[kind].chunks * pp
    if chunks > MODEL.layers + 2:
        pytest.skip("the model has fewer parts")
    assert many(pp, pp, schedule=KINDS[kind], micro_batch=2) == one_rank()


@pytest.mark.parametrize("dp, pp", [(2, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_dp_and_zero(dp, pp, zero):
    assert many(dp * pp, pp, zero=zero, micro_batch=1, schedule=pr.schedule.zb_h1()) == one_rank()


@pytest.mark.parametrize("seed", range(3))
def test_on_the_deferred_device(seed):
    options = dict(executor="deferred", seed=seed, micro_batch=2)
    assert many(2, 2, schedule=pr.schedule.zb_v(), **options) == one_rank()
    assert many(4, 2, zero=2 + seed % 2, **options) == one_rank()


def test_dropout_split_and_uneven_micro_batches():
    """O-PP-02: lanes of 4 samples in micro-batches of 3 and 1."""
    for options in (dict(split=[1, 4]), dict(split=[3, 2]), dict(micro_batch=3), {}):
        assert many(2, 2, model=GPT, **options) == one_rank(GPT)


TIED = pr.models.GPT(layers=4, hidden=16, heads=2, vocab=31, seq_len=12, dropout=0.1)


@pytest.mark.parametrize("kind", ["one_f_one_b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize("dp, pp, zero", [(1, 2, 0), (2, 2, 2), (2, 2, 3), (1, 3, 0), (4, 2, 1)])
def test_a_tied_embedding_on_two_stages(kind, dp, pp, zero):
    if KINDS[kind].chunks * pp > TIED.layers + 2:
        pytest.skip("the model has fewer parts")
    options = dict(model=TIED, zero=zero, micro_batch=2 if dp == 1 else 1)
    if kind == "interleaved" and pp == 3:
        options.update(micro_batch=2, schedule=pr.schedule.zb_h1())
    assert many(dp * pp, pp, **{"schedule": KINDS[kind], **options}) == one_rank(TIED)


def test_a_tied_embedding_on_the_deferred_device():
    for seed in range(2):
        options = dict(model=TIED, executor="deferred", seed=seed, micro_batch=2)
        assert many(2, 2, schedule=pr.schedule.zb_v(), **options) == one_rank(TIED)
        assert many(2, 2, **options) == one_rank(TIED)


def test_one_stage_with_a_schedule():
    assert many(1, 1, schedule=pr.schedule.zb_v()) == one_rank()
    assert many(2, 1, schedule=pr.schedule.interleaved(3), zero=1) == one_rank()


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("kind", ["gpipe", "one_f_one_b"])
def test_o_pp_03_few_micro_batches(pp, kind):
    model = pr.models.Llama(layers=2, hidden=8, heads=1, vocab=11, seq_len=4)
    for count in range(1, 10):
        data = batches(1, count, model)
        options = dict(model=model, data=data, global_batch=count, lanes=pr.Lanes(dp=1))
        assert many(pp, pp, schedule=KINDS[kind], **options) == many(1, 1, **options)


def test_o_pp_01_layers_that_do_not_divide():
    for layers in (5, 7):
        model = pr.models.Llama(layers=layers, hidden=8, heads=1, vocab=11, seq_len=4)
        options = dict(model=model, data=batches(1, 4, model), global_batch=4)
        one = many(1, 1, **options)
        for pp in (2, 3, 4):
            assert many(pp, pp, **options) == one


def test_o_pp_07_o_pp_08_evaluation_between_steps(tmp_path):
    """Other batch sizes and numbers of micro-batches, before, between and after steps of training."""
    random = np.random.default_rng(3)
    path = token_file(tmp_path, random.integers(0, MODEL.vocab, 40 * MODEL.seq_len + 1), MODEL.vocab)

    def run(world, pp, micro_batch, zero=0):
        data = pr.data.TokenDataset(path, seq_len=MODEL.seq_len)
        mesh = pr.Mesh(world, pp=pp)
        trainer = pr.Trainer(
            MODEL,
            mesh,
            optimizer=pr.SGD(lr=0.1),
            global_batch=4,
            micro_batch=micro_batch,
            lanes=pr.Lanes(dp=2),
            zero=zero,
        )
        losses = []
        for count, (tokens, targets) in zip((1, 9, 40), DATA, strict=True):
            losses.append(trainer.evaluate(data, num_samples=count))
            part = 4 // mesh.size("dp")
            first = part * mesh.coordinate("dp")
            losses.append(trainer.step(tokens[first : first + part], targets[first : first + part]).loss)
        return losses

    expected = run_ranks(1, lambda world: run(world, 1, 1))[0]
    for ranks, *options in ((2, 2, 2), (4, 2, 1), (3, 3, 4), (4, 2, 3, 3)):
        assert run_ranks(ranks, lambda world, options=options: run(world, *options)) == [expected] * ranks


def test_lengths_change_from_step_to_step():
    """O-PP-04, of steps."""
    data = [(tokens[:, :n], targets[:, :n]) for (tokens, targets), n in zip(DATA, (4, 12, 7), strict=True)]
    assert many(2, 2, data=data) == run_ranks(1, lambda world: train(world, 1, data=data))[0]


@pytest.mark.parametrize("recompute", [True, "attention"])
def test_recompute(recompute):
    model = pr.models.Llama(
        layers=6, hidden=16, heads=2, kv_heads=1, vocab=31, seq_len=12, recompute=recompute
    )
    assert many(2, 2, model=model, micro_batch=2, schedule=pr.schedule.zb_v()) == one_rank()
    assert many(4, 2, model=model, zero=2, precision="bf16") == many(1, 1, precision="bf16")


def test_what_recompute_saves():
    def saved(recompute):
        return pr.models.GPT(layers=4, hidden=64, heads=4, vocab=8, seq_len=16, recompute=recompute).cost()

    nothing, attention, blocks = saved(False), saved("attention"), saved(True)
    assert blocks["saved_bytes"] < attention["saved_bytes"] < 0.85 * nothing["saved_bytes"]
    for of in (attention, blocks):
        assert of["forward_flops"] == nothing["forward_flops"]
    more = [of["backward_input_flops"] - nothing["backward_input_flops"] for of in (attention, blocks)]
    assert 0 < more[0] < 0.5 * more[1]


@pytest.mark.parametrize("zero", [0, 2])
def test_memory_of_a_weight_that_two_stages_share(zero):
    """The last stage has a copy of the tied embedding; while a step runs both have its gradients by lane."""
    model = pr.models.GPT(layers=2, hidden=64, heads=4, vocab=1024, seq_len=8)

    def run(world):
        before = world.memory()["in_use_bytes"]
        mesh = pr.Mesh(world, pp=2)
        options = dict(global_batch=8, lanes=pr.Lanes(dp=4), zero=zero)
        trainer = pr.Trainer(model, mesh, optimizer=pr.AdamW(), **options)
        rows = 8 // mesh.size("dp")
        part = slice(mesh.coordinate("dp") * rows, (mesh.coordinate("dp") + 1) * rows)
        tokens, targets = batches(1, 8, model)[0]
        trainer.step(tokens[part], targets[part])
        kept = world.memory()["in_use_bytes"] - before
        world._core.reset_peak_memory()
        trainer.step(tokens[part], targets[part])
        peak = world.memory()["peak_bytes"] - before
        return mesh.coordinate("pp"), kept, peak, trainer.memory(), trainer.memory(step=True)

    tied = 4 * model.vocab * model.hidden
    for stage, kept, peak, terms, all_terms in run_ranks(4, run):
        assert terms["shared weights"] == (tied if stage == 1 else 0)
        assert kept == pytest.approx(sum(terms.values()), rel=0.02)
        assert all_terms["shared gradients"] == 2 * tied * (2 if stage == 0 else 1)  # two lanes a rank
        assert 0.7 * sum(all_terms.values()) < peak < 1.1 * sum(all_terms.values())


def test_weights_of_stage_3_are_gathered_once_a_step_unless_asked_otherwise():
    def run(world, gather, pp=2):
        trainer = pr.Trainer(
            MODEL,
            pr.Mesh(world, pp=pp),
            optimizer=pr.SGD(lr=0.1),
            global_batch=16,
            zero=pr.Zero(stage=3, gather=gather),
        )
        rows = 16 // trainer.mesh.size("dp")
        part = slice(trainer.mesh.coordinate("dp") * rows, (trainer.mesh.coordinate("dp") + 1) * rows)
        before = world.memory()["in_use_bytes"]
        world._core.record(True)
        loss = trainer.step(DATA[0][0][part], DATA[0][1][part]).loss
        world._core.record(False)
        assert world.memory()["in_use_bytes"] - before < 8192  # nothing whole stays
        gathered = sum(s["bytes"] for s in world._core.spans() if s["name"] == "all_gather")
        window = trainer.memory(step=True)["gather window"]
        return loss, gathered, window, trainer.memory()["weights"]

    step, use, default = (run_ranks(4, lambda world, g=g: run(world, g)) for g in ("step", "use", None))
    assert default == step
    for (loss, gathered, window, kept), (other_loss, other_gathered, other_window, _) in zip(
        step, use, strict=True
    ):
        assert loss == other_loss
        assert gathered < other_gathered / 8  # 8 micro-batches, forwards and backwards
        assert kept * 2 == window > other_window
    assert many(4, 2, zero=pr.Zero(stage=3, gather="use"), schedule=pr.schedule.zb_v()) == one_rank()
    (alone, *_), (by_default, *_) = (run_ranks(2, lambda world, g=g: run(world, g, 1)) for g in ("use", None))
    assert alone == by_default


# ---- micro-batches of different lengths ----

LENGTHS = {0: ((4, 7, 2, 7), (3, 12, 5, 1)), 1: ((9, 1, 6, 2), (2, 8, 12, 4))}  # by half of the batch, step


def ragged(half, step, model):
    """Four micro-batches of two samples."""
    random = np.random.default_rng(10 * half + step)
    shapes = [(2, length) for length in LENGTHS[half][step]]
    return [
        [random.integers(0, model.vocab, shape, dtype=np.int32) for shape in shapes]
        for _ in ("tokens", "targets")
    ]


def train_ragged(world, model=MODEL, *, pp=1, tp=1, **options):
    mesh = pr.Mesh(world, pp=pp, tp=tp)
    options = {"lanes": pr.Lanes(dp=2, tp=2), "clip_norm": 0.5, **options}
    optimizer = pr.AdamW(lr=1e-2, eps=1e-4)
    trainer = pr.Trainer(model, mesh, optimizer=optimizer, global_batch=16, micro_batch=2, **options)
    history = []
    for step in range(2):
        halves = range(2) if mesh.size("dp") == 1 else [mesh.coordinate("dp")]
        parts = [ragged(half, step, model) for half in halves]
        tokens, targets = ([array for part in parts for array in part[i]] for i in range(2))
        stats = trainer.step(tokens, targets)
        history.append((stats.loss.hex(), stats.grad_norm.hex(), stats.tokens, stats.valid_tokens))
        shape = tokens[1].shape if mesh.size("dp") == 1 else (2, 5)
        history.append(trainer.logits(np.ones(shape, dtype=np.int32)[:, :4]).tobytes())
    return history, fingerprint(trainer)


PAIRED = pr.models.Llama(layers=6, hidden=16, heads=2, kv_heads=2, vocab=31, seq_len=12)
WITH_POSITIONS = pr.models.GPT(layers=2, hidden=16, heads=2, vocab=31, seq_len=12)


@functools.cache
def one_ragged_rank(model=MODEL, lanes_tp=1):
    return run_ranks(1, lambda world: train_ragged(world, model, lanes=pr.Lanes(dp=2, tp=lanes_tp)))[0]


@pytest.mark.parametrize("ranks, pp", [(2, 2), (3, 3), (2, 1), (4, 2)])
def test_o_pp_04_sequence_length_changes_between_micro_batches(ranks, pp):
    for options in ({}, dict(schedule=pr.schedule.zb_h1(), zero=2)):
        options = {"lanes": pr.Lanes(dp=2), **({} if pp == 1 else options)}
        results = run_ranks(ranks, lambda world, o=options: train_ragged(world, pp=pp, **o))
        assert results == [one_ragged_rank()] * ranks
    history = one_ragged_rank()[0]
    assert [step[2] for step in history[::2]] == [2 * sum(LENGTHS[0][i] + LENGTHS[1][i]) for i in range(2)]


def test_o_pp_04_is_the_token_mean_of_what_is_there():
    """Equal to whole samples whose further targets do not count, up to the rounding of zeros that are added."""

    def run(world, whole):
        trainer = pr.Trainer(MODEL, pr.Mesh(world), optimizer=pr.SGD(lr=0.1), global_batch=8, micro_batch=2)
        tokens, targets = ragged(0, 0, MODEL)
        if whole:
            tokens = np.concatenate([np.pad(t, ((0, 0), (0, 12 - t.shape[1]))) for t in tokens])
            filler = dict(constant_values=-100)
            targets = np.concatenate([np.pad(t, ((0, 0), (0, 12 - t.shape[1])), **filler) for t in targets])
        stats = trainer.step(tokens, targets)
        return stats.valid_tokens, stats.loss, trainer.gradient("h.0.attn.qkv.weight")

    (apart,), (whole,) = (run_ranks(1, lambda world, w=w: run(world, w)) for w in (False, True))
    assert apart[0] == whole[0] == 2 * (4 + 7 + 2 + 7)
    assert apart[1] == pytest.approx(whole[1], rel=1e-6)
    np.testing.assert_allclose(apart[2], whole[2], atol=1e-7)


@pytest.mark.parametrize(
    "ranks, pp, model", [(4, 2, PAIRED), (8, 2, PAIRED), (8, 4, PAIRED), (2, 1, WITH_POSITIONS)]
)
def test_o_pp_05_lengths_with_tp_and_pp_differ_by_micro_batch_and_rank_of_dp(ranks, pp, model):
    results = run_ranks(ranks, lambda world: train_ragged(world, model, pp=pp, tp=2))
    assert results == [one_ragged_rank(model, 2)] * ranks


def test_what_is_wrong_with_a_list_of_micro_batches_is_said():
    def body(world):
        trainer = pr.Trainer(MODEL, pr.Mesh(world), optimizer=pr.SGD(lr=0.1), global_batch=8, micro_batch=3)
        good, other = ragged(0, 0, MODEL)

        def refusal(words, tokens, targets=other):
            refused(pr.errors.InvalidArgument, words, lambda: trainer.step(tokens, targets))

        refusal(["4 micro-batches", "expects 3", "[3, 3, 2]"], good)
        refusal(["micro-batch 0 has 2 samples", "[3, 3, 2]"], good[:3], other[:3])
        refusal(["as many"], good, other[:3])
        refusal(["as many"], good, np.zeros((8, 4), dtype=np.int32))

    run_ranks(1, body)


WIDE = pr.models.GPT(layers=2, hidden=64, heads=1, mlp_hidden=8, vocab=8, seq_len=64, tied=False)


def train_wide(world, pp):
    """Six micro-batches of 16 MiB at every boundary, forwards and backwards."""
    data = batches(1, 6 * 1024, WIDE)[0]
    options = dict(optimizer=pr.SGD(lr=0.1), global_batch=6 * 1024, micro_batch=1024)
    return pr.Trainer(WIDE, pr.Mesh(world, pp=pp), **options).step(*data).loss


@functools.cache
def one_wide_rank():
    return run_ranks(1, lambda world: train_wide(world, 1))[0]


IS_FULL = bool(os.environ.get("POLYREME_TEST_FULL"))


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL, reason="POLYREME_TEST_FULL=1 runs it; processes are always tried")
def test_o_pp_06_large_activations_both_ways_at_once():
    for pp in (2, 4):
        assert run_ranks(pp, lambda world, pp=pp: train_wide(world, pp)) == [one_wide_rank()] * pp


def test_o_pp_08_evaluation_has_a_mean_of_its_own(tmp_path):
    """Two micro-batches of equal token counts; training takes four."""
    random = np.random.default_rng(5)
    path = token_file(tmp_path, random.integers(0, MODEL.vocab, 2 * MODEL.seq_len + 1), MODEL.vocab)

    def run(world):
        data = pr.data.TokenDataset(path, seq_len=MODEL.seq_len)
        trainer = pr.Trainer(
            MODEL, pr.Mesh(world, pp=2), optimizer=pr.SGD(lr=0.1), global_batch=4, micro_batch=1
        )
        first, both = (trainer.evaluate(data, num_samples=count) for count in (1, 2))
        trainer.step(*(part[:4] for part in DATA[0]))
        assert trainer.evaluate(data, num_samples=2) != both
        return first, both

    def each(world):
        data = pr.data.TokenDataset(path, seq_len=MODEL.seq_len)
        trainer = pr.Trainer(MODEL, pr.Mesh(world), optimizer=pr.SGD(lr=0.1), global_batch=1)
        return trainer.evaluate(data, num_samples=1), trainer.evaluate(data, num_samples=2)

    assert run_ranks(2, run) == run_ranks(1, each) * 2


def test_o_pp_09_gradients_are_means_over_tokens():
    """24 valid tokens in three micro-batches of 10, 8 and 6."""
    tokens, targets = (part[:3].copy() for part in batches(1, 3, MODEL)[0])
    for row, valid in enumerate((10, 8, 6)):
        targets[row, valid:] = -100

    def run(world, pp):
        trainer = pr.Trainer(MODEL, pr.Mesh(world, pp=pp), optimizer=pr.SGD(lr=0.1), global_batch=3)
        assert trainer.step(tokens, targets).valid_tokens == 24
        return [trainer.gradient(name).tobytes() for name in trainer.parameter_names()]

    assert run_ranks(2, lambda world: run(world, 2)) == run_ranks(1, lambda world: run(world, 1)) * 2


def test_what_does_not_fit_is_refused_with_the_numbers():
    def refusal(error, words, ranks=2, pp=2, **options):
        run_ranks(ranks, lambda world: refused(error, words, lambda: train(world, pp, **options)))

    invalid = pr.errors.InvalidArgument
    refusal(invalid, ["[6] has 1 numbers", "2 chunks"], split=[6])
    refusal(invalid, ["has 5 layers; the model has 6"], split=[2, 3])
    refusal(invalid, ["8 layers cannot fill 10 chunks"], schedule=pr.schedule.interleaved(5))
    refusal(
        invalid,
        ["dual_pipe_v", "micro_batches=2"],
        schedule=pr.schedule.dual_pipe_v(),
        lanes=pr.Lanes(dp=1),
        micro_batch=8,
    )
    refusal(invalid, ["no pipeline to split"], ranks=1, pp=1, split=[6])


def test_stages_that_see_other_samples_are_told():
    def run(world):
        def step():
            trainer = pr.Trainer(MODEL, pr.Mesh(world, pp=2), optimizer=pr.SGD(lr=0.1), global_batch=16)
            tokens, targets = DATA[world.rank]
            trainer.step(tokens, targets)

        refused(pr.errors.InvalidArgument, ["pp rank", "another batch"], step)

    run_ranks(2, run)


def test_a_number_that_is_not_finite_names_its_parameter_on_all_stages():
    def run(world):
        trainer = pr.Trainer(MODEL, pr.Mesh(world, pp=2), optimizer=pr.SGD(lr=0.1), global_batch=16)
        weight = trainer.parameter("h.5.mlp.down.weight")
        weight[0, 0] = np.nan
        trainer.set_parameter("h.5.mlp.down.weight", weight)
        before = fingerprint_of_weights(trainer)
        refused(pr.errors.NumericError, ["'h.5.mlp.down.weight'"], lambda: trainer.step(*DATA[0]))
        assert fingerprint_of_weights(trainer) == before

    run_ranks(2, run)


def fingerprint_of_weights(trainer):
    return [trainer.parameter(name).tobytes() for name in trainer.parameter_names()]


# ---- processes ----

SCRIPT = """
import os, signal, sys, threading
import polyreme as pr
from test_pipeline import KINDS, MODEL, train
from helpers import batches

world = pr.init(init_timeout_s=20, timeout_s=20)
"""


@pytest.mark.mp
def test_processes_have_the_bits_of_one_rank(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT
        + "result = train(world, 2, schedule=KINDS['zb_v'], zero=1, micro_batch=2)\nprint('RESULT', repr(result[:2]))\n"
    )
    done = polyreme("run", "-n", 4, path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"RESULT {one_rank()[:2]!r}") == 4


@pytest.mark.mp
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"] if IS_FULL else ["tcp"])
def test_o_pp_06_between_processes(tmp_path, transport):
    path = tmp_path / "script.py"
    path.write_text(
        "import polyreme as pr\nfrom test_pipeline import train_wide\n"
        f"print('LOSS', train_wide(pr.init(transport={transport!r}, timeout_s=60), 2).hex())\n"
    )
    done = polyreme("run", "-n", 2, path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"LOSS {one_wide_rank().hex()}") == 2


@pytest.mark.mp
def test_f20_a_stage_that_is_killed_is_named_with_stage_and_micro_batch(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT
        + """
model = pr.models.Llama(layers=6, hidden=192, heads=2, vocab=256, seq_len=128)
trainer = pr.Trainer(model, pr.Mesh(world, pp=3), optimizer=pr.SGD(lr=0.1), global_batch=24)
data = batches(1, 24, model)[0]
trainer.step(*data)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which ends the others: let them speak first
if world.rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        trainer.step(*data)
except pr.errors.CommError as error:
    print("SAW", world.rank, error, flush=True)
    raise
"""
    )
    done = polyreme("run", "-n", 3, path)
    assert done.returncode != 0
    seen = [line for line in done.stdout.splitlines() if "SAW" in line]
    assert any("pipeline stage" in line and "micro-batch" in line and "rank 1" in line for line in seen), (
        done.stdout + done.stderr
    )


def test_state_that_a_parameter_does_not_have_is_refused_by_all_stages():
    model = pr.models.GPT(layers=2, hidden=32, heads=2, vocab=61, seq_len=16, tied=False)

    def body(world):
        trainer = pr.Trainer(model, pr.Mesh(world, pp=2), optimizer=pr.Muon(lr=0.1), global_batch=4)
        words = ["no 'momentum'"] if world.rank == 0 else ["pp rank 0 refused"]
        refused(pr.InvalidArgument, words, lambda: trainer.optimizer_state("wte.weight", "momentum"))
        return trainer.optimizer_state("h.0.mlp.fc.weight", "momentum").sum()

    assert run_ranks(2, body) == [0.0, 0.0]
