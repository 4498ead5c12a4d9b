"""What rank 0 shows: JSON lines in a pipe, one line that redraws itself on a terminal."""

from __future__ import annotations

import io
import json
import math

import polyreme as pr
import pytest
from polyreme import progress as progress_module

FIELDS = {"step", "loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "eta_s"}


class Terminal(io.StringIO):
    """Says that it is a terminal, of unknown width."""

    def isatty(self):
        return True


def stats(step, **changes):
    values = dict(loss=5.25, grad_norm=1.5, lr=1e-3, tokens=4096, valid_tokens=4000, seconds=0.5, mfu=0.625)
    return pr.StepStats(step=step, **{**values, **changes})


@pytest.fixture
def no_pause(monkeypatch):
    """Every step is drawn."""
    monkeypatch.setattr(progress_module, "_REDRAW_S", 0.0)


def lines(*reports, total=10):
    stream = io.StringIO()
    shown = pr.Progress(total, stream=stream)
    for report in reports:
        shown.report(report)
    return [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]


def test_json_lines_have_every_field():
    first, second = lines(stats(1), stats(2, validation_loss=6.5))
    assert set(first) == FIELDS
    assert first == {
        "step": 1,
        "loss": 5.25,
        "validation_loss": None,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens_per_s": 8192.0,
        "mfu": 0.625,
        "eta_s": 4.5,
    }
    assert second["validation_loss"] == 6.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_null(bad):
    [line] = lines(stats(1, loss=bad, grad_norm=bad, validation_loss=bad))
    assert (line["loss"], line["grad_norm"], line["validation_loss"]) == (None, None, None)


def test_without_a_measured_rate_there_is_no_mfu():
    assert lines(stats(1, mfu=None))[0]["mfu"] is None


def test_the_time_left_follows_the_average_of_the_steps():
    found = lines(stats(1, seconds=1.0), stats(2, seconds=2.0), stats(10))
    assert [line["eta_s"] for line in found] == [9.0, 8.8, 0.0]


def test_other_ranks_are_silent():
    stream = io.StringIO()
    pr.Progress(2, enabled=False, stream=stream).report(stats(1))
    assert stream.getvalue() == ""


def test_standard_output_is_the_default(capsys):
    pr.Progress(2).report(stats(1))
    assert set(json.loads(capsys.readouterr().out)) == FIELDS


def test_the_line_on_a_terminal_has_every_field(no_pause):
    stream = Terminal()
    shown = pr.Progress(300, stream=stream)
    shown.report(stats(149, validation_loss=6.5))
    shown.report(stats(150))
    kept, redrawn = stream.getvalue().split("\n")
    assert kept.startswith("\rstep 149/300")
    for field in (
        "150/300",
        "loss 5.2500",
        "val 6.5000",
        "norm 1.50",
        "lr 1.0e-03",
        "8,192 t",
        "MFU 62%",
        "ETA 1:15",
    ):
        assert field in redrawn, field


def test_redrawing_leaves_nothing_of_a_longer_line(no_pause):
    stream = Terminal()
    shown = pr.Progress(10, stream=stream)
    shown.report(stats(1, loss=100.0))
    shown.report(stats(2, loss=1.0))
    _, first, second = stream.getvalue().split("\r")
    assert len(first) == len(second)
    assert "\n" not in stream.getvalue()


def test_a_line_fits_a_narrow_terminal_so_that_it_can_be_redrawn(no_pause):
    stream = Terminal()
    shown = pr.Progress(10**6, stream=stream)
    for step in range(1, 4):
        shown.report(stats(step, loss=123.0, tokens=10**9))
    assert max(map(len, stream.getvalue().split("\r"))) == 79


def test_the_last_step_ends_the_line(no_pause):
    stream = Terminal()
    shown = pr.Progress(2, stream=stream)
    shown.report(stats(1))
    shown.report(stats(2))
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_quick_steps_are_not_all_drawn():
    stream = Terminal()
    shown = pr.Progress(10**6, stream=stream)
    for step in range(1, 1001):
        shown.report(stats(step))
    assert stream.getvalue().count("\r") < 500
