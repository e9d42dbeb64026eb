"""Tree of thought: from each of the best states so far several next steps at once, each judged by
the model itself; the best ones go on."""

from __future__ import annotations

import random

from demo import Workload, demo

import phloem

DEPTH, WIDTH, BEAM = 3, 3, 2
RULES = """\
Solve the problem step by step. After each step, say on a scale from 1 to 9 how good it is.

Problem: A room is 4 metres wide and 5 metres long. How much does a carpet at 3 coins a square \
metre cost?
Step: The room has 4 * 5 = 20 square metres.
Rating: 9
Step: 20 square metres at 3 coins are 60 coins.
Rating: 9
Answer: 60

"""


@phloem.function
def solve(s: phloem.State, problem: str) -> str:
    s += RULES + f"Problem: {problem}\n"
    beam = [s.copy()]
    for level in range(DEPTH):
        step, rating = f"step_{level}", f"rating_{level}"
        judged = phloem.gen_int(rating, minimum=1, maximum=9, max_tokens=4, temperature=0.0)
        groups = [state.fork(WIDTH) for state in beam]
        for group in groups:
            group += [
                "Step: " + phloem.gen(step, stop="\n", max_tokens=32, temperature=0.8, seed=branch)
                for branch in range(WIDTH)
            ]
            group += "\nRating: " + judged + "\n"
        branches = [branch for group in groups for branch in group]
        ratings = [int(branch[rating]) for branch in branches]
        order = sorted(range(len(branches)), key=ratings.__getitem__, reverse=True)
        beam = [branches[i] for i in order[:BEAM]]
    best = beam[0]
    answer = phloem.gen_int("answer", minimum=0, maximum=9999, max_tokens=8, temperature=0.0)
    best += "Answer: " + answer
    s["answer"] = int(best["answer"])
    s["ratings"] = [int(best[f"rating_{level}"]) for level in range(DEPTH)]
    return best.text().removeprefix(RULES)


PEOPLE = ["Ada", "Bo", "Cleo", "Dov", "Esme"]


def programs(n: int, seed: int) -> Workload:
    """`n` sums in words."""
    rng = random.Random(seed)
    return solve, [
        {
            "problem": f"{rng.choice(PEOPLE)} packs {rng.randint(3, 9)} boxes of "
            f"{rng.randint(4, 24)} eggs, drops {rng.randint(1, 9)} eggs on the way, and sells the "
            f"rest for {rng.randint(2, 5)} coins each. How many coins is that?"
        }
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    assert 0 <= state["answer"] <= 9999
    assert len(state["ratings"]) == DEPTH and all(1 <= rating <= 9 for rating in state["ratings"])
    assert state.returned.count("\nStep: ") == DEPTH


if __name__ == "__main__":
    demo(programs, check)
