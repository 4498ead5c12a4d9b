"""`polyreme bench scaling` at a tiny size, under real launchers; its statistics and its picture. No speed."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import polyreme as pr
import pytest
from helpers import HANG_S, clean_environment, json_lines, polyreme
from polyreme.bench.pipeline_times import bubbles, own_times
from polyreme.bench.scaling import Case, ScalingOptions, default_sizes, interval, render_scaling, summarise
from polyreme.bench.scaling_plot import plot_scaling
from polyreme.cli.main import main

TINY = ["--layers", 1, "--hidden", 16, "--heads", 2, "--vocab", 31, "--seq-len", 8]
MODEL = pr.models.GPT(layers=1, hidden=16, heads=2, vocab=31, seq_len=8)
SVG = "{http://www.w3.org/2000/svg}"


def options(**changes):
    return ScalingOptions(**{"model": MODEL, "sizes": (1, 2, 4), **changes})


def turns_of(opts, seconds):
    """What turns of `seconds`(case, repeat) would have given."""
    rest = {"cpu_seconds": 0.9, "peak_bytes": 1e6, "rss_bytes": 2e6, "collective_s": 0.1, "loss": 3.4}
    return {
        case: [{"seconds": seconds(case, repeat), **rest} for repeat in range(opts.repeats)]
        for case in opts.cases()
    }


def settings_of(opts):
    return {
        **dataclasses.asdict(opts),
        "launcher": "torchrun",
        "ranks": 4,
        "hosts": ["a"] * 4,
        "pinned": True,
        "load_average": 0.5,
        "device": "cpu",
        "crowded_sizes": [4],
    }


# ---- what is measured, and what follows ----


def test_cases_are_shared():
    opts = options(kinds=("weak", "strong"), zeros=(0, 1), batch=2)
    plain = {"precision": "fp32", "sums": "ordered", "bucket_mib": 25, "overlap": True}
    cases = opts.cases()
    assert len(set(cases)) == len(cases)
    # One rank has nothing to shard; the largest size is the same in both kinds.
    assert [case for case in cases if case.size == 1] == [
        Case(size=1, batch=2, zero=0, **plain),
        Case(size=1, batch=8, zero=0, **plain),
    ]
    assert [case for case in cases if case.size == 4] == [
        Case(size=4, batch=8, zero=0, **plain),
        Case(size=4, batch=8, zero=1, **plain),
    ]
    assert {case.batch for case in cases if case.size == 2} == {4, 8}


def test_efficiency_is_per_rank_and_repeat_by_repeat():
    opts = options(kinds=("weak", "strong"), repeats=4)
    # The machine is twice as slow in every other repeat: that must not show.
    turns = turns_of(opts, lambda c, r: (1 + r % 2) * c.batch / c.size * (1.0 if c.size == 1 else 1.25))
    rows = summarise(opts, turns)
    assert [(row["kind"], row["size"], row["batch"]) for row in rows] == [
        *(("weak", n, 2 * n) for n in (1, 2, 4)),
        *(("strong", n, 8) for n in (1, 2, 4)),
    ]
    for row in rows:
        expected = 1.0 if row["size"] == 1 else 0.8
        assert row["efficiency"] == pytest.approx(expected)
        assert row["efficiency_low"] == pytest.approx(expected)
        assert row["efficiency_high"] == pytest.approx(expected)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * MODEL.seq_len / row["seconds"])


def test_copies_tell_what_the_machine_keeps():
    opts = options(zeros=(0, 1), repeats=3, copies=True)
    copies = [case for case in opts.cases() if case.copies]
    assert [(case.size, case.batch, case.zero) for case in copies] == [(2, 2, 0), (4, 2, 0)]
    seconds = {(1, False): 1.0, (2, True): 1.25, (4, True): 1.25, (2, False): 1.5, (4, False): 1.5}
    rows = summarise(opts, turns_of(opts, lambda c, r: seconds[c.size, c.copies]))
    for row in rows:
        if row["size"] == 1:
            assert row["copies"] is row["of_copies"] is None
            continue
        assert row["copies"] == pytest.approx([0.8] * 3)
        assert row["of_copies"] == pytest.approx([1.25 / 1.5] * 3)
        assert row["efficiency"] == pytest.approx(1 / 1.5)
    text = "\n".join(render_scaling(settings_of(opts), rows))
    assert "83.3% (83.3 - 83.3%) of 4 jobs of one rank at once, which have an efficiency of 80.0%" in text


def test_ratio_of_a_later_series_to_the_first():
    opts = options(zeros=(0, 1), repeats=3)
    turns = turns_of(opts, lambda c, r: 2.0 if c.zero else 1.0)
    rows = {(row["zero"], row["size"]): row for row in summarise(opts, turns)}
    assert rows[0, 4]["ratio"] == pytest.approx(1.0)
    assert rows[1, 4]["ratio"] == pytest.approx(0.5)
    text = "\n".join(render_scaling(settings_of(opts), list(rows.values())))
    assert (
        "zero=0 fp32 ordered 25 MiB overlap takes 0.500 (0.500 to 0.500) of the time of zero=1 fp32" in text
    )
    assert "more threads than CPUs at 4 ranks" in text


def test_interval_of_student():
    mean, low, high = interval([0.9, 1.0, 1.1])
    assert mean == pytest.approx(math.prod([0.9, 1.0, 1.1]) ** (1 / 3))
    logs = [math.log(x) for x in (0.9, 1.0, 1.1)]
    deviation = math.sqrt(sum((x - sum(logs) / 3) ** 2 for x in logs) / 2)
    assert math.log(high / mean) == pytest.approx(4.303 * deviation / math.sqrt(3))
    assert math.log(mean / low) == pytest.approx(math.log(high / mean))
    assert interval([0.5]) == (pytest.approx(0.5), None, None)


def test_default_sizes():
    assert default_sizes(1) == [1]
    assert default_sizes(6) == [1, 2, 4, 6]
    assert default_sizes(8) == [1, 2, 4, 8]


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_picture_is_xml_with_every_point(repeats):
    opts = options(kinds=("weak", "strong"), zeros=(0, 1), repeats=repeats)
    rows = summarise(opts, turns_of(opts, lambda c, r: c.batch / c.size + 0.01 * r * c.size))
    root = ElementTree.fromstring(plot_scaling(settings_of(opts), rows))
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}circle")) == 2 * len(rows)
    bars = root.findall(f"{SVG}path")
    assert len(bars) == (len(rows) if repeats > 1 else 0)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for circle in root.findall(f"{SVG}circle"):
        assert 0 <= float(circle.get("cx")) <= width
        assert 0 <= float(circle.get("cy")) <= height
    texts = [element.text for element in root.findall(f"{SVG}text")]
    assert "strong, zero=1 fp32 ordered 25 MiB overlap" in texts


def test_a_picture_of_one_size():
    opts = options(sizes=(1,), repeats=1)
    ElementTree.fromstring(plot_scaling(settings_of(opts), summarise(opts, turns_of(opts, lambda c, r: 1.0))))


# ---- real processes ----


def check(records, *, sizes, kinds=("weak",), zeros=(0,), repeats=2):
    settings, *rest = records
    assert settings["record"] == "settings"
    assert settings["sizes"] == list(sizes)
    assert len(settings["cpus"]) == settings["ranks"] == len(settings["hosts"])
    turns = [record for record in rest if record["record"] == "turn"]
    assert {turn["repeat"] for turn in turns} == set(range(repeats))
    for turn in turns:
        assert turn["seconds"] > 0
        assert turn["cpu_seconds"] > 0
        assert turn["peak_bytes"] > 0
        assert turn["rss_bytes"] > turn["peak_bytes"]
        assert len(turn["step_seconds"]) == 1
        assert turn["breakdown_s"]["gemm"] > 0
    # Repeats are interleaved, and start from the same weights.
    losses = {(turn["size"], turn["batch"], turn["zero"], turn["loss"]) for turn in turns}
    assert len(turns) == repeats * len(losses)
    order = [(turn["size"], turn["batch"], turn["zero"]) for turn in turns]
    assert order == order[: len(losses)] * repeats
    rows = [record for record in rest if record["record"] == "summary"]
    assert [(row["kind"], row["zero"], row["size"]) for row in rows] == [
        (kind, zero, size) for kind in kinds for zero in zeros for size in sizes
    ]
    for row in rows:
        assert row["efficiency_low"] <= row["efficiency"] <= row["efficiency_high"]
        assert row["tokens_per_s"] > 0
    return settings, rows


@pytest.mark.mp
def test_every_option_of_the_reduction_is_a_series():
    more = ["--zero", "3", "--precision", "fp32,bf16", "--bucket-mib", "1,25", "--overlap", "on,off"]
    more += ["--prefetch", "0,2", "--repeats", 1]
    done = polyreme("bench", "scaling", *TINY, "--sizes", "1,2", *more, "--json")
    assert done.returncode == 0, done.stderr
    rows = [row for row in json_lines(done.stdout) if row["record"] == "summary"]
    assert len({row["label"] for row in rows}) == 16
    assert len(rows) == 32
    for size in (1, 2):
        losses = {(row["precision"], row["loss"]) for row in rows if row["size"] == size}
        assert sorted(precision for precision, _ in losses) == ["bf16", "fp32"]


@pytest.mark.mp
def test_alone_it_starts_its_own_ranks(tmp_path):
    out, picture = tmp_path / "s.jsonl", tmp_path / "s.svg"
    more = ["--kinds", "weak,strong", "--zero", "0,1", "--repeats", 2, "--out", out, "--plot", picture]
    done = polyreme("bench", "scaling", *TINY, "--sizes", "1,2", *more)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    settings, rows = check(records, sizes=[1, 2], kinds=("weak", "strong"), zeros=(0, 1))
    assert settings["launcher"] == "polyreme run"
    assert "efficiency" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith(("weak ", "strong "))]) == len(
        rows
    )
    assert len(ElementTree.parse(picture).getroot().findall(f"{SVG}circle")) == 2 * len(rows)
    strong = {row["loss"] for row in rows if row["kind"] == "strong"}
    assert len(strong) == 1


@pytest.mark.mp
def test_in_a_job_it_uses_its_ranks():
    """More ranks than this machine may have CPUs: sizes in between are measured while the others sleep."""
    tiny = [*TINY, "--repeats", 2, "--batch", 1, "--copies", "--json"]
    done = polyreme("run", "-n", 3, "-m", "polyreme", "bench", "scaling", *tiny)
    assert done.returncode == 0, done.stderr
    records = json_lines(done.stdout)
    copies = [record for record in records if record.get("copies") is True]
    assert [turn["size"] for turn in copies[1:]] == 2 * [2, 3]  # the first record has the settings
    settings, rows = check([record for record in records if record not in copies[1:]], sizes=[1, 2, 3])
    assert settings["ranks"] == 3
    assert all(row["of_copies"][0] > 0 for row in rows[1:])


@pytest.mark.mp
def test_one_rank_alone():
    done = polyreme("bench", "scaling", *TINY, "--sizes", 1, "--repeats", 2, "--json")
    assert done.returncode == 0, done.stderr
    settings, rows = check(json_lines(done.stdout), sizes=[1])
    assert settings["launcher"] == "one rank"
    assert rows[0]["efficiency"] == 1


@pytest.mark.mp
def test_ordered_against_fast():
    done = polyreme("bench", "scaling", *TINY, "--sizes", 2, "--sums", "ordered,fast", "--repeats", 1)
    assert done.returncode == 0, done.stderr
    assert "fast sums are the ordered ones" in done.stdout
    assert "zero=0 fp32 ordered 25 MiB overlap takes" in done.stdout


@pytest.mark.mp
@pytest.mark.slow
@pytest.mark.torch
def test_under_torchrun():
    import reference  # noqa: F401  (skips where PyTorch is missing)

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "polyreme", "bench", "scaling", *TINY, "--repeats", 2, "--json"]
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=3 * HANG_S,  # every process imports PyTorch
        check=False,
    )
    assert done.returncode == 0, done.stderr
    settings, _ = check(json_lines(done.stdout), sizes=[1, 2])
    assert settings["launcher"] == "torchrun"


@pytest.mark.mp
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_other_axes(axis):
    even = ["--layers", 3, "--hidden", 16, "--heads", 2, "--vocab", 31, "--seq-len", 8]
    more = ["--micro-batches", "2,4", "--schedule", "one_f_one_b,zb_h1"] if axis == "pp" else []
    done = polyreme(
        "bench", "scaling", *even, "--axis", axis, "--sizes", "1,2", *more, "--repeats", 1, "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = [record for record in json_lines(done.stdout) if record["record"] == "summary"]
    assert len(rows) == (8 if axis == "pp" else 2)
    for row in rows:
        assert row["efficiency"] > 0
        if axis == "pp" and row["size"] == 2:
            m = row["micro_batches"]
            assert row["batch"] == m
            assert 0 < row["predicted"] < 1
            assert 0 < row["bubble"] < 1
            assert 0.5 <= row["balance"] <= 1
        else:
            assert row["bubble"] is row["predicted"] is None
    settings = {**settings_of(options(axis=axis, sizes=(1, 2), repeats=1)), "axis": axis}
    table = render_scaling(settings, rows)
    assert any("bubble" in line for line in table) == (axis == "pp")


def test_bubbles_of_an_even_pipeline_are_those_of_the_paper():
    """(p - 1) / (m + p - 1) of 1F1B, from spans as the recorder would have them on a machine without noise."""
    for stages, m in ((2, 4), (4, 8)):
        schedule = pr.schedule.one_f_one_b().build(stages, m)
        timeline = schedule.simulate(pr.schedule.Costs(forward=1, backward_input=1, backward_weight=1))
        ranks = []
        for rank, actions in enumerate(schedule.actions):
            spans = [
                {"kind": "other", "name": action.kind, "start_ns": int(1e9 * start), "end_ns": int(1e9 * end)}
                for action, (start, end) in zip(actions, timeline.spans[rank], strict=True)
            ]
            ranks.append(own_times(spans, schedule, rank, 1))
            backwards = [span for span in spans if span["name"] != "forward"]
            assert own_times(backwards, schedule, rank, 1) is None
        found = bubbles(np.array(ranks), schedule, 1)
        assert found["bubble"] == pytest.approx((stages - 1) / (m + stages - 1))
        assert found["predicted"] == pytest.approx(found["bubble"])
        assert found["balance"] == pytest.approx(1)


@pytest.mark.mp
def test_under_open_mpi():
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("not installed: mpirun.openmpi")
    command = ["mpirun.openmpi", "-n", "2", "--bind-to", "none", sys.executable]
    command += ["-m", "polyreme", "bench", "scaling", *TINY, "--repeats", 2, "--json"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment(**root, OMPI_MCA_rmaps_base_oversubscribe="1"),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    settings, _ = check(json_lines(done.stdout), sizes=[1, 2])
    assert settings["launcher"] == "Open MPI"


# ---- refusals ----


@pytest.mark.parametrize(
    "words_given, code, words",
    [
        (["--axis", "x"], 2, ["--axis x", "expected dp, tp or pp"]),
        (["--axis", "pp", "--schedule", "zb"], 2, ["--schedule zb", "zb_h1"]),
        (["--axis", "pp", "--micro-batches", "0"], 2, ["--micro-batches=0", "at least 1"]),
        (
            ["--axis", "pp", "--micro-batches", "3", "--sizes", "1,2"],
            2,
            ["--micro-batches 3", "multiples of 2"],
        ),
        (["--sizes", "2,1"], 2, ["--sizes 2,1", "ascending"]),
        (["--sizes", "0,1"], 2, ["--sizes 0,1", "ascending"]),
        (["--sizes", "2,4", "--copies"], 2, ["--copies", "--sizes 1,2"]),
        (["--sizes", "two"], 2, ["--sizes two", "1,2"]),
        (["--kinds", "weak,big"], 2, ["--kinds weak,big", "weak, strong"]),
        (["--kinds", "weak,weak"], 2, ["--kinds weak,weak", "different"]),
        (["--zero", "7"], 2, ["zero=7"]),
        (["--precision", "fp64"], None, ["fp64"]),
        (["--sums", "quick"], 2, ["--sums quick", "ordered, fast"]),
        (["--bucket-mib", "0"], 2, ["--bucket-mib=0", "at least 1"]),
        (["--prefetch", "0,1", "--zero", "2,3"], 2, ["--prefetch", "--zero 3"]),
        (["--overlap", "on,yes"], 2, ["--overlap on,yes", "on, off"]),
        (["--batch", 0], 2, ["batch=0"]),
        (["--batch", 3, "--micro-batch", 2], 2, ["batch=3", "micro_batch=2"]),
        (["--repeats", 0], 2, ["repeats=0"]),
        (["--threads", 0], 2, ["threads=0"]),
        (["--plot", "x.png"], 2, ["--plot x.png", ".svg"]),
        (["--sizes", "2,3", "--kinds", "strong", "--batch", 1], 2, ["2 ranks", "3 samples", "--batch 1"]),
    ],
)
def test_refusals_are_told_in_one_line_before_anything_starts(words_given, code, words, capfd):
    returned = main(["bench", "scaling", *map(str, TINY), *map(str, words_given)])
    output, errors = capfd.readouterr()
    assert returned in ((1, 2) if code is None else (code,))
    assert output == ""
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in words), errors


@pytest.mark.mp
def test_more_ranks_than_the_job_has():
    done = polyreme("run", "-n", 2, "-m", "polyreme", "bench", "scaling", *TINY, "--sizes", "1,4")
    assert done.returncode == 2
    assert "--sizes 1,4: this job has 2 rank(s); start 4 of them" in done.stderr
