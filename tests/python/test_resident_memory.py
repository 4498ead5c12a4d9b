"""What the system says that a process takes, against the formula; in fresh processes."""

from __future__ import annotations

import json

import pytest
from helpers import polyreme

SCRIPT = """
import json, sys
import polyreme as pr
from helpers import batches, local_part

def resident_bytes():
    # Pages that ranks share are divided among them, as each rank reads its peers' in place.
    lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
    return 1024 * int(lines["Pss"].split()[0])

world = pr.init(num_threads=1)
model = pr.models.GPT(layers=2, hidden=1024, heads=4, vocab=1024, seq_len=8)
small = pr.models.GPT(layers=1, hidden=16, heads=4, vocab=64, seq_len=8)

def train(model, **options):
    trainer = pr.Trainer(model, pr.Mesh(world), optimizer=pr.AdamW(lr=1e-3), global_batch=2, **options)
    for tokens, targets in batches(2, 2, model):
        trainer.step(local_part(world, tokens), local_part(world, targets))
    return trainer

options = dict(zero=int(sys.argv[1]), precision=sys.argv[2])
train(small, **options)  # code, threads and scratch memory are there
world.barrier()
resident, reserved = resident_bytes(), world.memory()["reserved_bytes"]
trainer = train(model, **options)
world.barrier()
json.dump({
    "resident": resident_bytes() - resident,
    "reserved": world.memory()["reserved_bytes"] - reserved,
    # What a step has had at once stays with the allocator.
    "formula": sum(trainer.memory(step=True).values()),
}, open(f"{sys.argv[3]}/{world.rank}.json", "w"))
world.barrier()
"""


@pytest.mark.mp
@pytest.mark.parametrize("ranks, zero, precision", [(1, 0, "fp32"), (2, 1, "bf16"), (2, 3, "fp32")])
def test_growth_is_the_formula(tmp_path, ranks, zero, precision):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = polyreme("run", "-n", ranks, path, zero, precision, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        each = json.loads((tmp_path / f"{rank}.json").read_text())
        assert each["resident"] == pytest.approx(each["reserved"], rel=0.05), each
        # In 16 bits the allocator also keeps the fp32 copy through which the largest parameter was drawn; the terms
        # of a step in stage 3 are the most that each of them has, which is not all at one time.
        if precision == "fp32":
            low = 0.95 if zero < 3 else 0.9
            assert low * each["formula"] <= each["resident"] <= 1.05 * each["formula"], each
