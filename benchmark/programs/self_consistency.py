"""Self-consistency: several ways of working a problem out, drawn at once, then a majority vote."""

from __future__ import annotations

import random
from collections import Counter

from demo import Workload, demo

import phloem

SAMPLES = 8
EXAMPLES = """\
Question: A shelf has 3 boards with 12 books each. 5 books are lent out. How many are there?
Work: 3 boards of 12 books are 36 books. 36 less 5 is 31.
Answer: 31

Question: A train with 8 carriages has 40 seats in each. 290 people sit. How many seats are free?
Work: 8 carriages of 40 seats are 320 seats. 320 less 290 is 30.
Answer: 30

Question: 6 hens lay 5 eggs a week each. How many eggs are there after 3 weeks?
Work: 6 hens lay 30 eggs a week. In 3 weeks that is 90.
Answer: 90

"""


@phloem.function
def vote(s: phloem.State, question: str) -> int:
    s += EXAMPLES + f"Question: {question}\nWork: "
    s += phloem.gen("work", n=SAMPLES, stop="\n", max_tokens=48, temperature=0.8, seed=1)
    answer = phloem.gen_int("answer", minimum=0, maximum=9999, max_tokens=8, temperature=0.0)
    voters = s.fork(SAMPLES)
    voters += [work + "\nAnswer: " + answer for work in s["work"]]
    voters.join()
    return int(Counter(s["answer"]).most_common(1)[0][0])


THINGS = ["bags of nuts", "boxes of nails", "rolls of wire", "jars of beads", "packs of cards"]


def programs(n: int, seed: int) -> Workload:
    """`n` sums in words."""
    rng = random.Random(seed)
    return vote, [
        {
            "question": f"{rng.randint(3, 12)} {rng.choice(THINGS)} weigh {rng.randint(2, 20)} "
            f"pounds each, and the cart weighs {rng.randint(20, 90)} pounds. What do they weigh "
            "together?"
        }
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    assert len(state["work"]) == len(state["answer"]) == SAMPLES
    answers = Counter(int(answer) for answer in state["answer"])
    assert all(0 <= answer <= 9999 for answer in answers)
    assert answers[state.returned] == max(answers.values())


if __name__ == "__main__":
    demo(programs, check)
