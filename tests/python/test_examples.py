"""The examples run as they stand, and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import polyreme

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.torch
@pytest.mark.mp
@pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests")
def test_torch_zero2_prints_the_same_on_any_number_of_ranks():
    pytest.importorskip("torch")
    texts = []
    for ranks in (1, 2):
        done = polyreme("run", "-n", ranks, EXAMPLES / "02_torch_zero2.py", "--steps", 20)
        assert done.returncode == 0, done.stderr
        texts.append([line[line.index("step") :] for line in done.stdout.splitlines() if "step" in line])
    assert texts[0] == texts[1]
    assert [text.split(":")[0] for text in texts[0]] == ["step 10", "step 20"]
