"""Copies in memory of a job on two hosts: each keeps its own ranks' and the other's."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys

import pytest
from helpers import HANG_S, json_lines, python_corpus
from polyreme.checkpoint import complete_steps
from test_fast_restart import SCRIPT as RESTARTED
from two_hosts import ADDRESSES, PORT, TwoHosts, why_not

pytestmark = pytest.mark.mp

SEGMENT = "/dev/shm/polyreme-two-hosts-memory-1-1-ab"
SCRIPT = """
import json, os, signal
import numpy as np
import polyreme as pr
from polyreme.checkpoint import ArrayPart

world = pr.init(init_timeout_s=30, timeout_s=20, heartbeat_s=0.5, peer_timeout_s=3, num_threads=1)
size = 100_003
begin, end = size * world.rank // world.size, size * (world.rank + 1) // world.size

def state(step):
    own = np.arange(begin, end) + 1_000_000 * step
    return {"model/w": np.full(50, step, np.float32), "optimizer/m": ArrayPart(own, (size,), begin)}

with pr.Checkpointer(os.environ["RUNS"], world=world, memory_every=1, signals=False) as checkpoints:
    for step in json.loads(os.environ["SAVES"]):
        checkpoints.save_async(state(step), step=step, memory=step > 1)
    checkpoints.wait()
    if os.environ["DIES"]:
        world.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    loaded = state(0)
    restored = checkpoints.load(loaded)
    expected = state(restored.step)
    assert (loaded["model/w"] == expected["model/w"]).all()
    assert (loaded["optimizer/m"].array == expected["optimizer/m"].array).all()
    stats = checkpoints.memory_stats
    print(json.dumps({"step": restored.step, "source": restored.source, "saved": stats.saved, "failed": stats.failed}))
"""


def run(hosts, path, saves, *, dies=False):
    """Starts the job; returns what each rank says."""
    hosts._ranks.clear()
    environment = {"POLYREME_MEMORY": SEGMENT, "RUNS": str(path.parent / "runs"), "SAVES": json.dumps(saves)}
    hosts.start(path, (2, 2), DIES="yes" if dies else "", **environment)
    ends = hosts.ends()
    if dies:
        assert ends[2][0] == -signal.SIGKILL
        return []
    assert [code for code, _, _ in ends] == [0] * 4, ends
    found = [json_lines(out)[0] for _, out, _ in ends]
    assert all(each == found[0] for each in found)
    return found[0], "".join(errors for _, _, errors in ends)


def test_what_the_hosts_keep_for_each_other(tmp_path):
    if reason := why_not():
        assert not os.environ.get("POLYREME_REQUIRE_NAMESPACES"), reason
        pytest.skip(reason)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with TwoHosts() as hosts:
        for host in range(2):
            hosts.on(host, "mkdir", "-m", "700", SEGMENT)
        run(hosts, path, [1, 2, 3, 4], dies=True)
        assert complete_steps(tmp_path / "runs") == [1]
        # A process has died: both hosts have all of the newest two.
        found, _ = run(hosts, path, [])
        assert (found["step"], found["source"]) == (4, "memory")
        # A host is replaced: the other one has its part.
        hosts.on(0, "sh", "-c", f"rm -rf {SEGMENT}/*")
        found, _ = run(hosts, path, [])
        assert (found["step"], found["source"]) == (4, "memory")
        found, _ = run(hosts, path, [5])
        assert found == {"step": 5, "source": "memory", "saved": 1, "failed": 0}
        # A file is nowhere any more: the copy before it, then the disk.
        for host in range(2):
            hosts.on(host, "sh", "-c", f"rm {SEGMENT}/*/step-0000000005/optimizer.00003.*")
        found, errors = run(hosts, path, [])
        assert (found["step"], found["source"]) == (4, "memory")
        assert "no host has 'optimizer.00003.safetensors'" in errors
        for host in range(2):
            hosts.on(host, "sh", "-c", f"rm {SEGMENT}/*/step-000000000[45]/manifest.json")
        found, _ = run(hosts, path, [])
        assert (found["step"], found["source"]) == (1, "disk")


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path):
    """A rank of the second node dies. Its agent counts a restart, the other one may not; both ranks meet again, and
    go on from memory."""
    if reason := why_not():
        pytest.skip(reason)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torchrun is not installed")
    (tmp_path / "script.py").write_text(RESTARTED)
    (tmp_path / "hosts").write_text("\n".join(map(" ".join, zip(ADDRESSES, ("left", "right"), strict=True))))
    (tmp_path / "nsswitch.conf").write_text("hosts: files\n")  # nobody else is asked for names
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
    script = [
        str(tmp_path / "script.py"),
        str(python_corpus(tmp_path)),
        str(tmp_path / "run"),
        "1",
        "[[0, 9]]",
    ]
    with TwoHosts() as hosts:
        for host, address in enumerate(ADDRESSES):
            for name in ("hosts", "nsswitch.conf"):
                hosts.on(host, "mount", "--bind", str(tmp_path / name), f"/etc/{name}")
            hosts.launch(host, [*command, "--local-addr", address, *script])
        ends = hosts.ends(5 * HANG_S)
        assert [code for code, _, _ in ends] == [0, 0], ends
        (found,) = [line for _, out, _ in ends for line in json_lines(out)]
        assert found["source"] == [8, "memory"]
