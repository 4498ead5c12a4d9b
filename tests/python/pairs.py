"""A choice of combinations in which every two values of different options occur together."""

from __future__ import annotations

import itertools
import random


def all_pairs(options, *, seed=0, candidates=60):
    """Dicts from option to value; `options` maps each option to its values.

    Greedy, like AETG (Cohen et al. 1997): of some random combinations that hold a pair not seen yet, the one
    with the most such pairs is next. Most faults need no more than two values to meet.
    """
    draw = random.Random(seed)
    names = list(options)
    unseen = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]
    }

    def pairs_of(choice):
        return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(names, 2)}

    chosen = []
    while unseen:
        best, most = None, 0
        for _ in range(candidates):
            a, x, b, y = draw.choice(sorted(unseen, key=repr))
            choice = {name: draw.choice(options[name]) for name in names} | {a: x, b: y}
            new = len(pairs_of(choice) & unseen)
            if new > most:
                best, most = choice, new
        chosen.append(best)
        unseen -= pairs_of(best)
    return chosen
