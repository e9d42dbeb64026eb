"""Branch, solve, merge: one essay is judged from several sides at once, then summed up.

The essay is computed once for all judges, and their opinions are generated side by side.
"""

from __future__ import annotations

import json
import random
from typing import Any

from demo import Workload, demo

import phloem

SIDES = {
    "clarity": "Can every sentence be understood at once?",
    "evidence": "Does the writer give reasons and examples?",
    "order": "Does each thought follow from the one before?",
    "style": "Is it pleasant to read?",
    "courage": "Does the writer take a side?",
}
VERDICT = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "maxLength": 160},
        "grade": {"enum": ["poor", "fair", "good", "excellent"]},
    },
    "required": ["summary", "grade"],
    "additionalProperties": False,
}


@phloem.function
def judge(s: phloem.State, essay: str) -> dict[str, Any]:
    s += phloem.system("You are a fair and careful judge of essays.")
    s += phloem.user(f"Read this essay.\n\n{essay}")
    s += phloem.assistant("I have read it.")
    panel = s.fork(len(SIDES))
    panel += [phloem.user(f"Judge its {side}. {question}") for side, question in SIDES.items()]
    panel += phloem.assistant(phloem.gen("opinion", stop="\n", max_tokens=40, temperature=0.0))
    panel += phloem.user("How many points of 9 is that worth?")
    points = phloem.gen_int("points", minimum=1, maximum=9, max_tokens=4, temperature=0.0)
    panel += phloem.assistant(points)
    panel.join()
    opinions = zip(SIDES, s["opinion"], s["points"], strict=True)
    s += phloem.user(
        "\n".join(f"{side}: {opinion} ({points} of 9)" for side, opinion, points in opinions)
        + "\n\nSum this up in one sentence and give a grade, as JSON."
    )
    s += phloem.assistant(
        phloem.gen("verdict", json_schema=VERDICT, max_tokens=200, temperature=0.0)
    )
    verdict: dict[str, Any] = json.loads(s["verdict"])
    return verdict


SENTENCES = [
    "A bridge is a promise that two towns make to each other.",
    "Ours was built by people who would never cross it, for people they would never meet.",
    "Some say that it is too narrow; I say that it makes us greet each other.",
    "In the flood of that spring it stood when the road on both sides of it did not.",
    "The council wants to replace it, since a new one would need less paint.",
    "Paint, however, is cheaper than memory.",
    "I have counted: in one hour eighty bicycles crossed it, and four cars.",
    "Of the four cars, three turned back, having lost their way.",
    "A wider bridge would be crossed faster, but what would we do with the time?",
    "Children learn to wave there, because the boats wave back.",
    "It is true that the railing rusts, and it is true that we have brushes.",
    "An engineer from the city told me that it will last for forty years.",
    "Whoever tears down what works owes us a reason, not a drawing.",
    "The market stands at one end, the school at the other, and the day lies between.",
]


def programs(n: int, seed: int) -> Workload:
    """`n` essays of twelve sentences, in one order or another."""
    rng = random.Random(seed)
    return judge, [{"essay": " ".join(rng.sample(SENTENCES, 12))} for _ in range(n)]


def check(state: phloem.State) -> None:
    assert len(state["opinion"]) == len(state["points"]) == len(SIDES)
    assert all(1 <= int(points) <= 9 for points in state["points"])
    verdict = json.loads(state["verdict"])
    assert set(verdict) == {"summary", "grade"} and len(verdict["summary"]) <= 160


if __name__ == "__main__":
    demo(programs, check)
