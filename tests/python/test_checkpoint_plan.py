"""The save plan at the sizes that count: planning grows linearly in ranks and tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers import clean_environment

FULL = os.environ.get("POLYREME_TEST_FULL") == "1"

# ZeRO over all ranks: every rank has all weights, and its slice of the moments of every unit of 50 tensors.
SCRIPT = """
import json, resource, sys, time
import numpy as np
from polyreme import _core
ranks, tensors = map(int, sys.argv[1:])
elements, per_unit = 1 << 20, 50
table = [(f"model/w{t}", elements, 4) for t in range(tensors)] + [(f"optimizer/m{t}", elements, 4) for t in range(tensors)]
weights = np.stack([np.arange(tensors), np.zeros(tensors, int), np.full(tensors, elements)], axis=1)
held, units = [], -(-tensors // per_unit)
for rank in range(ranks):
    rows = []
    for unit in range(units):
        first, last = unit * per_unit, min(tensors, (unit + 1) * per_unit)
        size = (last - first) * elements
        at, stop = size * rank // ranks, size * (rank + 1) // ranks
        while at < stop:
            t, begin = divmod(at, elements)
            end = min(elements, begin + stop - at)
            rows.append((tensors + first + t, begin, end))
            at += end - begin
    held.append(np.concatenate([weights, np.array(rows)]).astype(np.int64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
pieces, loads = _core.plan_save(table, held, list(range(ranks)), 1)
seconds = time.process_time() - start
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([seconds, grown * 1024, len(pieces), min(loads), max(loads), sum(loads)]))
"""


@pytest.mark.parametrize("ranks, tensors", [(64, 400), (1024, 5000)] if FULL else [(64, 400)])
def test_planning(ranks, tensors):
    command = [sys.executable, "-c", SCRIPT, str(ranks), str(tensors)]
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=300, check=True
    )
    seconds, grown, _, low, high, total = json.loads(result.stdout)
    print(f"{ranks} ranks x {tensors} tensors: {seconds:.2f} s, {grown / 2**20:.0f} MiB")
    assert total == 2 * tensors * (4 << 20)
    assert high - low <= 2 << 20  # two grains
    # What the largest job may take, in seconds of CPU time and bytes, by the share of its pieces.
    share = max(ranks * tensors / (1024 * 5000), 0.1)
    assert seconds < 5 * share
    assert grown < share * 2**30
