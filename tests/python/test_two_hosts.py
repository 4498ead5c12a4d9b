"""A job on two hosts: shared memory inside, TCP between, the same bits; and what a network does to it."""

from __future__ import annotations

import json
import os
import textwrap
import time

import polyreme as pr
import pytest
from helpers import TINY, alone, batches, train
from two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.mp

HEAD = """
import json, os, sys, time
import numpy as np
import polyreme as pr
from helpers import TINY, batches, train

world = pr.init(init_timeout_s=30, timeout_s=20, heartbeat_s=0.5, peer_timeout_s=3)
group = pr.Mesh(world)["dp"]

def reached(name):
    open(f"{os.environ['MEET']}/{name}-{world.rank}", "w").close()
"""
# All-reduces of 4 MB until something happens, or the file "enough" is there.
REDUCE = """
data = np.ones(1 << 20, np.float32)
sums = 0
while True:
    total = group.all_reduce(data)
    assert (total == world.size).all()
    sums += 1
    reached("reducing")
    # All stop after the same number: rank 0 says when.
    stop = np.array([os.path.exists(f"{os.environ['MEET']}/enough")], np.int32)
    if group.broadcast(stop, root=0)[0]:
        break
print("SUMS", sums)
"""


@pytest.fixture(scope="module", autouse=True)
def possible():
    reason = why_not()
    if reason:
        assert not os.environ.get("POLYREME_REQUIRE_NAMESPACES"), reason
        pytest.skip(reason)


@pytest.fixture
def hosts():
    with TwoHosts() as made:
        yield made


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return path

    return write


def start(hosts, path, ranks_of=(2, 2), **environment):
    hosts.start(path, ranks_of, MEET=str(path.parent), **environment)


def reached(path, name, count):
    return [path.parent / f"{name}-{rank}" for rank in range(count)]


@pytest.mark.parametrize("ranks_of", [(2, 2), (3, 1)], ids=["grid", "uneven"])
def test_the_bits_of_one_rank(hosts, script, ranks_of):
    path = script(
        """
        data = batches(3, 8, pr.models.GPT(**TINY))
        print("RESULT", json.dumps(train(world, data, lanes=pr.Lanes(dp=4), zero=1)))
        print("HOSTS", json.dumps(world.hosts))
        """
    )
    start(hosts, path, ranks_of)
    ends = hosts.ends()
    assert [(code, err) for code, _, err in ends] == [(0, "")] * 4
    expected = train(alone(), batches(3, 8, pr.models.GPT(**TINY)), lanes=pr.Lanes(dp=4))
    for _, out, _ in ends:
        result = json.loads(out.split("RESULT ")[1].splitlines()[0])
        assert result == json.loads(json.dumps(expected))
        hosts_seen = json.loads(out.split("HOSTS ")[1].splitlines()[0])
        assert hosts_seen == ["left"] * ranks_of[0] + ["right"] * ranks_of[1]


def errors(ends, survivors):
    """The last lines of the survivors' errors, none of which ended well."""
    for rank in survivors:
        assert ends[rank][0] != 0, f"rank {rank} did not fail:\n{ends[rank]}"
    return [ends[rank][2].strip().splitlines()[-1] for rank in survivors]


def test_the_scaling_benchmark_makes_worlds_over_both(hosts, tmp_path):
    """Sizes within the first host, and over both: 1, 2 and 4 ranks."""
    path = tmp_path / "scaling.py"
    path.write_text(
        """if True:
        from polyreme.cli.main import main

        tiny = "--layers 1 --hidden 16 --heads 2 --vocab 31 --seq-len 8 --repeats 1 --zero 1"
        raise SystemExit(main(["bench", "scaling", *tiny.split(), "--json"]))
        """
    )
    hosts.start(path)
    ends = hosts.ends()
    assert [(code, err) for code, _, err in ends] == [(0, "")] * 4
    records = [json.loads(line) for line in ends[0][1].splitlines()]
    assert [record["size"] for record in records if record["record"] == "summary"] == [1, 2, 4]
    assert len(set(records[0]["hosts"])) == 2
    assert all(out == "" for _, out, _ in ends[1:])


def test_f16_a_rank_killed_on_the_other_host_is_named_by_all(hosts, script):
    path = script(REDUCE)
    start(hosts, path)
    hosts.wait_for(reached(path, "reducing", 4))
    killed = time.monotonic()
    hosts.kill(3)
    texts = errors(hosts.ends(), [0, 1, 2])
    assert time.monotonic() - killed < 20
    for text in texts:
        assert text.startswith("polyreme.errors.PeerLost"), text
        assert "rank 3 " in text, text
        assert "host right" in text, text


def test_f47_a_cable_that_is_cut_is_noticed_on_both_sides(hosts, script):
    path = script(REDUCE)
    start(hosts, path)
    hosts.wait_for(reached(path, "reducing", 4))
    cut = time.monotonic()
    hosts.cable(up=False)
    texts = errors(hosts.ends(), range(4))
    assert time.monotonic() - cut < 20
    assert all("host right" in text for text in texts[:2]), texts
    assert all("host left" in text for text in texts[2:]), texts


def test_f48_a_cut_of_a_second_is_survived(hosts, script):
    path = script(REDUCE)
    start(hosts, path)
    hosts.wait_for(reached(path, "reducing", 4))
    hosts.cable(up=False)
    time.sleep(1)
    hosts.cable(up=True)
    hosts.on(1, "ip", "address", "replace", "192.0.2.2/24", "dev", "cable")
    time.sleep(1)
    (path.parent / "enough").touch()
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [0] * 4, ends
    assert len({out for _, out, _ in ends}) == 1


def test_f49_a_slow_link_is_slow_and_nothing_else(hosts, script):
    path = script(REDUCE)
    start(hosts, path)
    hosts.wait_for(reached(path, "reducing", 4))
    for host in (0, 1):
        hosts.on(
            host,
            *[
                "tc",
                "qdisc",
                "add",
                "dev",
                "cable",
                "root",
                "tbf",
                "rate",
                "20mbit",
                "burst",
                "32kbit",
                "latency",
                "400ms",
            ],
        )
    (path.parent / "enough").touch()
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [0] * 4, ends


def test_f14_an_interface_that_does_not_lead_there_is_named(hosts, script):
    path = script("print(group.all_reduce(np.ones(1)))")
    start(hosts, path, POLYREME_INTERFACE="lo")
    ends = hosts.ends()
    text = "\n".join(errors(ends, range(4)))
    assert "127.0.0.1" in text
    assert "lo" in text
