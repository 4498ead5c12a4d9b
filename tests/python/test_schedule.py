"""Pipeline schedules from Python: against an independent checker, by mutation, and every form both ways."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import xml.etree.ElementTree as ET

import polyreme as pr
import pytest
from helpers import polyreme
from polyreme.schedule import Action, Costs, Schedule

KINDS = {
    "gpipe": pr.schedule.gpipe(),
    "one_f_one_b": pr.schedule.one_f_one_b(),
    "interleaved": pr.schedule.interleaved(chunks=2),
    "interleaved3": pr.schedule.interleaved(chunks=3),
    "zb_h1": pr.schedule.zb_h1(),
    "zb_v": pr.schedule.zb_v(),
    "dual_pipe_v": pr.schedule.dual_pipe_v(),
}


@contextlib.contextmanager
def refuses(*parts):
    """InvalidArgument, with all the parts in its message."""
    with pytest.raises(pr.errors.InvalidArgument) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


# ---- a checker of its own: sets and a graph, where the library runs the lists ----

TRANSFERS = ("send_activation", "recv_activation", "send_gradient", "recv_gradient")
SENDS = {"send_activation": ("recv_activation", 1), "send_gradient": ("recv_gradient", -1)}
COLLECTIVES = ("gather", "release", "reduce", "step")  # their own rules are tested in C++
HALVES = {
    "forward": ("F",),
    "backward": ("I", "W"),
    "backward_input": ("I",),
    "backward_weight": ("W",),
}


def acyclic(nodes, edges):
    """Whether the directed graph has an order (Kahn)."""
    into = dict.fromkeys(nodes, 0)
    for targets in edges.values():
        for target in targets:
            into[target] += 1
    free = [node for node in nodes if into[node] == 0]
    seen = 0
    while free:
        node = free.pop()
        seen += 1
        for target in edges.get(node, ()):
            into[target] -= 1
            if into[target] == 0:
                free.append(target)
    return seen == len(into)


def groups_of(actions):
    """Lists of positions that run at once."""
    groups = []
    for position, action in enumerate(actions):
        if action.with_previous:
            if position == 0 or {action.kind, actions[position - 1].kind} - set(TRANSFERS):
                return None
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def is_valid(schedule):
    """Whether the lists are complete, ordered, first-in-first-out and free of deadlocks on two replicas of the
    pipeline at once, by the definition: everything that happens is a node, and what must come first an edge.
    """
    owner = {chunk: rank for rank, held in enumerate(schedule.chunks) for chunk in held}
    last = len(owner) - 1
    done = {}  # what -> (rank, position) at which it is there
    needs = []  # (rank, position, what)
    channels = {}
    order = {}
    for rank, actions in enumerate(schedule.actions):
        for position, (kind, chunk, micro_batch, peer, _) in enumerate(actions):
            place = (rank, position)
            if kind in COLLECTIVES:
                continue
            if owner.get(chunk) != rank or not 0 <= micro_batch < schedule.micro_batches:
                return False
            if kind in HALVES:
                made = [(half, chunk, micro_batch) for half in HALVES[kind]]
                for half, neighbour in (("F", chunk - 1), ("I", chunk + 1)):
                    if (half, chunk, micro_batch) in made and 0 <= neighbour <= last:
                        local = owner[neighbour] == rank
                        needs.append(
                            (
                                *place,
                                (half if local else "R" + half, neighbour if local else chunk, micro_batch),
                            )
                        )
                if "I" in HALVES[kind]:
                    needs.append((*place, ("F", chunk, micro_batch)))
                if kind == "backward_weight":
                    needs.append((*place, ("I", chunk, micro_batch)))
                if "W" in HALVES[kind]:
                    order.setdefault(chunk, []).append(micro_batch)
            elif kind in SENDS:
                half = "F" if kind == "send_activation" else "I"
                made = [("S" + half, chunk, micro_batch)]
                needs.append((*place, (half, chunk, micro_batch)))
                channels.setdefault((rank, peer), ([], []))[0].append((kind, chunk, micro_batch, place))
            else:
                half = "F" if kind == "recv_activation" else "I"
                made = [("R" + half, chunk, micro_batch)]
                channels.setdefault((peer, rank), ([], []))[1].append((kind, chunk, micro_batch, place))
            for what in made:
                if what in done:
                    return False
                done[what] = place
    wanted = {(h, c, m) for h in "FIW" for c in owner for m in range(schedule.micro_batches)}
    for c, m in itertools.product(range(last), range(schedule.micro_batches)):
        if owner[c] != owner[c + 1]:
            wanted |= {("SF", c, m), ("RF", c + 1, m), ("SI", c + 1, m), ("RI", c, m)}
    if set(done) != wanted or any(sorted(ms) != ms for ms in order.values()):
        return False
    grouped = [groups_of(actions) for actions in schedule.actions]
    if any(groups is None for groups in grouped):
        return False
    group_of = {
        (r, p): g for r, groups in enumerate(grouped) for g, group in enumerate(groups) for p in group
    }
    for rank, position, what in needs:
        if done[what][0] != rank or group_of[done[what]] >= group_of[rank, position]:
            return False
    pairs = []
    for sent, received in channels.values():
        if len(sent) != len(received):
            return False
        for (kind, chunk, m, here), (other, to, m2, there) in zip(sent, received, strict=True):
            if SENDS[kind] != (other, to - chunk) or m != m2:
                return False
            pairs.append((here, there))
    kinds = [
        [actions[g[0]].kind for g in groups]
        for actions, groups in zip(schedule.actions, grouped, strict=True)
    ]
    return deadlock_free(kinds, group_of, pairs, replicas=2)


def deadlock_free(kinds, group_of, pairs, replicas):
    """Begin and end of every group on every replica (the dp axis), in the order of its list. A transfer needs
    both begins, and both ends need it. A collective begins on all its members before it ends on any.
    """
    nodes, edges = set(), {}

    def edge(before, after):
        nodes.update((before, after))
        edges.setdefault(before, []).append(after)

    steps = [
        (d, r, g)
        for d in range(replicas)
        for r, ks in enumerate(kinds)
        for g, k in enumerate(ks)
        if k == "step"
    ]
    for d in range(replicas):
        for rank, groups in enumerate(kinds):
            for g, kind in enumerate(groups):
                if g > 0:
                    edge(("end", d, rank, g - 1), ("begin", d, rank, g))
                members = [(e, rank, g) for e in range(replicas)] if kind in COLLECTIVES else [(d, rank, g)]
                for member in steps if kind == "step" else members:
                    edge(("begin", d, rank, g), ("end", *member))
        for n, pair in enumerate(pairs):
            for place in pair:
                edge(("begin", d, place[0], group_of[place]), ("transfer", d, n))
                edge(("transfer", d, n), ("end", d, place[0], group_of[place]))
    return acyclic(nodes, edges)


def sizes(kind):
    for stages, micro_batches in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 12)):
        if kind == "dual_pipe_v" and micro_batches < 2 * stages:
            continue
        if kind.startswith("interleaved") and micro_batches % stages:
            continue
        yield stages, micro_batches


@pytest.mark.parametrize("kind", KINDS)
def test_the_independent_checker_agrees_that_what_is_generated_is_valid(kind):
    for stages, micro_batches in sizes(kind):
        schedule = KINDS[kind].build(stages, micro_batches)
        schedule.validate()
        assert is_valid(schedule), (stages, micro_batches)
        schedule = schedule.with_collectives(gather="use", reduce=True, step=True)
        schedule.validate()
        assert is_valid(schedule), (stages, micro_batches)


def mutated(rng, schedule):
    """The schedule with one or two random changes."""
    lists = [list(actions) for actions in schedule.actions]
    for _ in range(rng.choice((1, 1, 2))):
        actions = rng.choice([a for a in lists if len(a) > 1])
        i, j = rng.sample(range(len(actions)), 2)
        change = rng.choice(
            (
                "swap",
                "neighbours",
                "neighbours",
                "drop",
                "copy",
                "move",
                "late",
                "late",
                "late",
                "split",
                "join",
                "renumber",
            )
        )
        if change == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif change == "neighbours":
            i = min(i, len(actions) - 2)
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
        elif change == "drop":
            del actions[i]
        elif change == "copy":
            actions.insert(j, actions[i])
        elif change == "move":
            actions.insert(j, actions.pop(i))
        elif change == "late":  # a send, which nothing on its own rank waits for
            i = rng.choice([n for n, action in enumerate(actions) if action.kind in SENDS])
            actions.insert(i + rng.randint(1, 8), actions.pop(i)._replace(with_previous=False))
        elif change == "split":
            actions[i] = actions[i]._replace(with_previous=False)
        elif change == "join" and actions[i].kind in TRANSFERS:
            actions[i] = actions[i]._replace(with_previous=True)
        elif change == "renumber":
            actions[i] = actions[i]._replace(micro_batch=rng.randrange(schedule.micro_batches))
    return Schedule.from_actions(lists, micro_batches=schedule.micro_batches, chunks=schedule.chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_mutations_are_refused_exactly_when_the_independent_checker_refuses(kind):
    rng = random.Random(kind)
    verdicts = []
    for stages, micro_batches in ((2, 4), (3, 6), (4, 8)):
        schedule = KINDS[kind].build(stages, micro_batches)
        for _ in range(120):
            mutant = mutated(rng, schedule)
            problem = mutant.problem()
            assert (problem is None) == is_valid(mutant), f"{problem}\n{mutant.to_text()}"
            verdicts.append(problem)
    reasons = " ".join(problem.reason for problem in verdicts if problem is not None)
    assert None in verdicts, "no mutant was valid"
    for part in ("missing", "second time", "comes before", "deadlock"):
        assert part in reasons


# ---- hand-written ----


def test_computations_alone_get_their_transfers_when_built():
    text = "micro_batches: 2\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n"
    fixed = pr.schedule.from_text(text)
    assert not fixed.schedule.has_transfers
    built = fixed.build(stages=2, micro_batches=2)
    assert is_valid(built)
    assert built.without_transfers() == fixed.schedule
    assert built == pr.schedule.one_f_one_b().build(2, 2)
    with refuses("stages=2, micro_batches=2", "stages=2, micro_batches=4"):
        fixed.build(2, 4)
    with refuses("computations alone", "with_transfers"):
        fixed.schedule.simulate()
    assert fixed.build_forward_only(2, 5).micro_batches == 5
    with refuses("rank 1, action 1 (B1)", "comes before F1@1"):
        pr.schedule.from_text(text.replace("F0 B0 F1 B1", "F0 B1 F1 B0")).build(2, 2)


def test_a_deadlock_names_its_circle():
    text = "micro_batches: 2\n0: F0 SA0 F1 SA1 RG0 B0 RG1 B1\n1: RA0 F0 B0 SG0 RA1 F1 B1 SG1\n"
    problem = Schedule.from_text(text).problem()
    assert problem is not None
    assert problem.cycle == ((0, 3, "SA1>1", 1), (1, 3, "SG0>0", 0))
    assert "deadlock" in problem.reason
    with refuses("schedule: rank 0, action 3 (SA1>1): deadlock"):
        pr.schedule.from_text(text).build(2, 2)


def test_lanes_relax_the_order_of_weight_gradients():
    schedule = Schedule.from_text("micro_batches: 4\n0: F0 F1 F2 F3 B2 B3 B0 B1\n")
    with refuses("ascending order"):
        schedule.validate()
    schedule.validate(lanes=2)
    with refuses("lanes=5"):
        schedule.validate(lanes=5)


# ---- figures ----


def test_figures_of_a_known_schedule():
    schedule = pr.schedule.one_f_one_b().build(stages=4, micro_batches=8)
    assert schedule.peak_activations == (4, 3, 2, 1)
    timeline = schedule.simulate()
    assert timeline.makespan == 33
    assert timeline.bubble == pytest.approx([3 / 11] * 4)
    assert timeline.mean_bubble == pytest.approx(3 / 11)
    assert len(timeline.spans[2]) == len(schedule.actions[2])
    assert schedule.peak_bytes(activation=100) == (400, 300, 200, 100)
    slower = schedule.simulate(Costs(latency=0.5, transfer_bytes=100, bandwidth=400))
    assert slower.makespan > schedule.simulate(Costs(latency=0.5)).makespan > timeline.makespan
    assert schedule.simulate(Costs(forward=[1, 2, 1, 1])).makespan > timeline.makespan


def test_measured_costs_reorder_the_transfers():
    costs = Costs(forward=3, backward_input=4, backward_weight=2)
    schedule = pr.schedule.dual_pipe_v().build(4, 12)
    again = schedule.with_transfers(costs)
    assert again.without_transfers() == schedule.without_transfers()
    assert is_valid(again)
    assert again.simulate(costs).makespan <= schedule.simulate(costs).makespan


def test_collectives_are_added_on_request():
    schedule = pr.schedule.zb_v().build(2, 4).with_collectives(gather="step", reduce=True, step=True)
    schedule.validate()
    assert [actions[-1].kind for actions in schedule.actions] == ["step", "step"]
    assert sum(action.kind == "gather" for action in schedule.actions[0]) == 2
    with refuses("unknown gather 'always'", "none, step or use"):
        schedule.with_collectives(gather="always")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (dict(forward=-1), ["Costs: forward=-1"]),
        (dict(forward="fast"), ["Costs: forward='fast'"]),
        (dict(forward=[1, float("nan")]), ["Costs: forward[1]"]),
        (dict(bandwidth=0), ["Costs: bandwidth=0"]),
        (dict(overlap=1), ["Costs: overlap=1"]),
    ],
)
def test_bad_costs_are_refused(arguments, parts):
    with refuses(*parts):
        Costs(**arguments)


@pytest.mark.parametrize(
    "kind, stages, micro_batches, parts",
    [
        ("interleaved", 4, 10, ["micro_batches=10", "8 or 12"]),
        ("dual_pipe_v", 4, 5, ["micro_batches=8 or more", "at most 2 stages"]),
        ("gpipe", 0, 4, ["gpipe: stages=0"]),
        ("gpipe", 2, 0, ["gpipe: micro_batches=0"]),
        ("zb_v", 2.0, 4, ["zb_v: stages=2.0"]),
        ("zb_v", 1 << 40, 4, ["zb_v: stages"]),
    ],
)
def test_sizes_that_do_not_work_are_refused(kind, stages, micro_batches, parts):
    with refuses(*parts):
        KINDS[kind].build(stages, micro_batches)


def test_o_pp_03_few_micro_batches():
    for name, stages, micro_batches in itertools.product(("gpipe", "one_f_one_b"), (2, 4), range(1, 10)):
        schedule = KINDS[name].build(stages, micro_batches)
        assert is_valid(schedule)
        assert all(0 <= a.micro_batch < micro_batches for actions in schedule.actions for a in actions)


def test_o_pp_08_evaluation_has_a_schedule_of_its_own():
    for name, micro_batches in itertools.product(KINDS, (1, 2, 3, 5)):
        schedule = KINDS[name].build_forward_only(3, micro_batches)
        schedule.validate()
        assert schedule.forward_only
        assert schedule.chunks == KINDS[name].build(3, 6).chunks
        assert {a.kind for actions in schedule.actions for a in actions} <= {
            "forward",
            "send_activation",
            "recv_activation",
        }


# ---- forms ----


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_json_are_read_back(kind, tmp_path):
    schedule = KINDS[kind].build(3, 6).with_collectives(gather="use", reduce=True, step=True)
    for form, text in (("txt", schedule.to_text()), ("json", schedule.to_json())):
        path = tmp_path / f"schedule.{form}"
        path.write_text(text)
        assert pr.schedule.from_file(path).build(3, 6) == schedule
    assert Schedule.from_json(schedule.to_json()) == Schedule.from_text(schedule.to_text())
    assert Schedule.from_actions(schedule.actions, micro_batches=6, chunks=schedule.chunks) == schedule
    assert schedule != KINDS[kind].build(3, 6)


GOOD = json.loads(pr.schedule.gpipe().build(2, 1).to_json())


def changed(**fields):
    return json.dumps({**GOOD, **fields})


def changed_action(**fields):
    ranks = [[dict(action) for action in rank] for rank in GOOD["ranks"]]
    ranks[1][0] |= fields
    return changed(ranks=ranks)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["line 1, column 1"]),
        ('{"format":\n "x",}', ["line 2"]),
        ("[]", ["the top", "expected an object"]),
        ("{}", ["'chunks' is missing"]),
        ('{"a": 1, "a": 2}', ["'a' stands twice"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"micro_batches": 1.5}', ["1.5", "integers alone"]),
        ('{"micro_batches": NaN}', ["NaN", "integers alone"]),
        ('{"micro_batches": ' + "9" * 10_000 + "}", ["schedule JSON"]),
        (changed(more=1), ["unknown field 'more'"]),
        (changed(format="x"), ["format: 'x'"]),
        (changed(version=2), ["version=2"]),
        (changed(forward_only=0), ["forward_only: 0"]),
        (changed(micro_batches=True), ["micro_batches=True"]),
        (changed(micro_batches=0), ["0 micro-batches"]),
        (changed(micro_batches=1 << 31), ["micro_batches"]),
        (changed(chunks=[[0], "1"]), ["chunks[1]: '1'", "a list"]),
        (changed(chunks=[[0], [-1]]), ["chunks[1][0]=-1"]),
        (changed(chunks=[[0], [5]]), ["rank 1 holds chunk 5"]),
        (changed(chunks=[[]] * 1025), ["chunks", "at most 1024"]),
        (changed(ranks=[[]]), ["1 lists for 2 ranks"]),
        (changed(ranks=[[1], []]), ["ranks[0][0]: 1", "an object"]),
        (changed_action(kind="fly"), ["unknown kind of action 'fly'", "forward"]),
        (changed_action(kind=1), ["ranks[1][0].kind: 1"]),
        (changed_action(peer="0"), ["ranks[1][0].peer='0'"]),
        (changed_action(with_previous=1), ["ranks[1][0].with_previous: 1"]),
        (changed_action(speed=1), ["ranks[1][0]: unknown field 'speed'"]),
    ],
)
def test_malformed_json_is_refused(text, parts):
    with refuses(*parts):
        Schedule.from_json(text)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("micro_batches: 1\n0: F0 Q0\n")
    with refuses(str(path), "line 2, 'Q0'"):
        pr.schedule.from_file(path)
    path.write_bytes(b"micro_batches: 1\n0: F0 \xc3\xa9\n")
    with refuses(str(path), "byte 23 is not ASCII"):
        pr.schedule.from_file(path)
    with pytest.raises(FileNotFoundError):
        pr.schedule.from_file(tmp_path / "none.txt")


def test_actions_are_checked_when_validated():
    schedule = Schedule.from_actions([[Action("forward", 0, 3)]], micro_batches=1)
    with refuses("rank 0, action 0 (F3)", "micro-batch 3"):
        schedule.validate()
    with refuses("unknown kind of action 'jump'"):
        Schedule.from_actions([[Action("jump")]], micro_batches=1)


# ---- pictures ----


def test_the_svg_draws_every_computation():
    schedule = pr.schedule.zb_v().build(3, 5)
    root = ET.fromstring(schedule.svg(Costs(latency=0.1)))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    drawn = [title.split(":")[0] for title in titles[1:]]
    lines = schedule.to_text().replace("[", "").replace("]", "").splitlines()[2:]
    assert sorted(drawn) == sorted(word for line in lines for word in line.split()[1:])
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {
        "rank 2",
        "4",
        "forward",
        "backward of the weights (later chunk)",
        "transfer or collective",
    } <= words


def test_the_terminal_form_shows_letters_at_their_times():
    lines = pr.schedule.one_f_one_b().build(2, 2).terminal(width=100).splitlines()
    assert lines == ["rank 0 F0 F1 ......B0    ...B1", "rank 1 ...F0 B0    F1 B1    ......"]
    for line in pr.schedule.zb_v().build(4, 32).terminal(width=60).splitlines():
        assert len(line) <= 60


# ---- the command ----


def test_show_prints_and_writes(tmp_path):
    sizes = ("--stages", 4, "--micro-batches", 8)
    out = tmp_path / "s.svg"
    done = polyreme("schedule", "show", "--kind", "zb_v", *sizes, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "makespan 51, bubble 5.9%" in done.stdout
    assert "rank 3: bubble 5.9%, at most 8 activations at once" in done.stdout
    ET.parse(out)
    text = tmp_path / "s.txt"
    done = polyreme("schedule", "show", "--kind", "zb_v", *sizes, "--out", text, "--json")
    figures = json.loads(done.stdout)
    assert figures["makespan"] == 51
    assert pr.schedule.from_file(text).build(4, 8) == Schedule.from_json(json.dumps(figures["schedule"]))
    done = polyreme(
        "schedule", "show", "--file", text, "--costs", "forward=2,backward_input=2:2:2:2:2:2:2:2,latency=0"
    )
    assert done.returncode == 0, done.stderr
    done = polyreme(
        "schedule", "show", "--kind", "interleaved", *sizes, "--chunks", 3, "--forward-only", "--json"
    )
    assert json.loads(done.stdout)["peak_activations"] == [0] * 4


@pytest.mark.parametrize(
    "arguments, code, parts",
    [
        (["--kind", "zb_v"], 2, ["needs --stages N and --micro-batches N"]),
        (["--kind", "zb_v", "--stages", 2, "--micro-batches", 2, "--chunks", 2], 2, ["--chunks is for"]),
        (["--kind", "gpipe", "--stages", 2, "--micro-batches", 2, "--out", "a.png"], 2, ["a.png", ".svg"]),
        (["--kind", "gpipe", "--stages", 2, "--micro-batches", 2, "--costs", "speed=1"], 2, ["'speed=1'"]),
        (
            ["--kind", "gpipe", "--stages", 2, "--micro-batches", 2, "--costs", "step=x"],
            2,
            ["'x' is no number"],
        ),
        (["--kind", "gpipe", "--stages", 2, "--micro-batches", 2, "--costs", "step=1,step=2"], 2, ["twice"]),
        (["--kind", "interleaved", "--stages", 4, "--micro-batches", 10], 2, ["8 or 12"]),
        (["--file", "none.txt"], 2, ["none.txt", "check the path"]),
        (["--file", "none.txt", "--kind", "zb_v"], 2, ["not allowed with"]),
    ],
)
def test_show_refuses(arguments, code, parts, tmp_path):
    done = polyreme("schedule", "show", *arguments, cwd=tmp_path)
    assert done.returncode == code
    for part in parts:
        assert part in done.stderr


def test_check_says_whether_a_file_is_valid(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("micro_batches: 2\n0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    done = polyreme("schedule", "check", path)
    assert done.returncode == 0, done.stderr
    assert "valid, 2 stages, 2 micro-batches, as computations" in done.stdout
    path.write_text("micro_batches: 2\n0: F0 SA0 F1 SA1 RG0 B0 RG1 B1\n1: RA0 F0 B0 SG0 RA1 F1 B1 SG1\n")
    done = polyreme("schedule", "check", path)
    assert done.returncode == 1
    assert "rank 0, action 3 (SA1>1): deadlock" in done.stderr
    done = polyreme("schedule", "check", path, "--json")
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert not verdict["valid"]
    assert verdict["cycle"][1] == {"rank": 1, "position": 3, "action": "SG0>0", "waits_for": 0}
    path.write_text("micro_batches: 2\n0: what\n")
    done = polyreme("schedule", "check", path, "--json")
    assert done.returncode == 1
    assert "line 2, 'what'" in json.loads(done.stdout)["reason"]
