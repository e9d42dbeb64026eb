"""Skeleton of thought: first the points of an answer, then all of them written out at once.

The skeleton is a JSON list, so that its points can be told apart for certain.
"""

from __future__ import annotations

import json
import random

from demo import Workload, demo

import phloem

POINTS = 4
SKELETON = {
    "type": "array",
    "items": {"type": "string", "minLength": 3, "maxLength": 40},
    "minItems": POINTS,
    "maxItems": POINTS,
}


@phloem.function
def advise(s: phloem.State, topic: str) -> str:
    s += phloem.system("You give practical advice, briefly and in a friendly tone.")
    s += phloem.user(f"Give {POINTS} tips on {topic}. First only their titles, as a JSON list.")
    s += phloem.assistant(
        phloem.gen("skeleton", json_schema=SKELETON, max_tokens=200, temperature=0.0)
    )
    titles = json.loads(s["skeleton"])
    forks = s.fork(len(titles))
    forks += [phloem.user(f"Now write out the tip “{title}” in two sentences.") for title in titles]
    forks += phloem.assistant(phloem.gen("tip", max_tokens=56, temperature=0.0))
    forks.join()
    return "\n".join(f"{title}: {tip}" for title, tip in zip(titles, s["tip"], strict=True))


ACTIVITIES = ["keeping bees", "moving house", "learning to swim", "baking bread", "sleeping well"]
PEOPLE = ["a student", "a family of five", "somebody over seventy", "a very busy person"]
LIMITS = ["little money", "no garden", "one free hand", "noisy neighbours", "an hour a week"]


def programs(n: int, seed: int) -> Workload:
    """`n` topics."""
    rng = random.Random(seed)
    return advise, [
        {"topic": f"{rng.choice(ACTIVITIES)} for {rng.choice(PEOPLE)} with {rng.choice(LIMITS)}"}
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    titles = json.loads(state["skeleton"])
    assert len(titles) == POINTS and all(3 <= len(title) <= 40 for title in titles)
    assert len(state["tip"]) == POINTS


if __name__ == "__main__":
    demo(programs, check)
