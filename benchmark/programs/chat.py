"""A conversation of several turns: each one is computed from where the last one ended."""

from __future__ import annotations

import random

from demo import Workload, demo

import phloem

TURNS = 4
GUIDE = """\
You are the guide of a small museum of clocks. The museum is open from ten to five, on Thursdays \
until nine, and closed on Mondays. There is a lift. Dogs stay outside; prams and wheelchairs go \
everywhere but into the tower. You answer in one or two sentences, and politely."""


@phloem.function
def converse(s: phloem.State, questions: list[str]) -> None:
    s += phloem.system(GUIDE)
    for turn, question in enumerate(questions):
        s += phloem.user(question)
        s += phloem.assistant(phloem.gen(f"answer_{turn}", max_tokens=48, temperature=0.0))


VISITORS = ["my two children", "a class of thirty", "my grandmother", "eight colleagues", "my dog"]
QUESTIONS = [
    "I would like to come with {} next Thursday after work, at about seven. Is that too late, and "
    "do we have to tell you before we come?",
    "We have never been to a museum of clocks. What is there to see for {}, apart from clocks, and "
    "how much time should one bring?",
    "Somebody told me that every clock in the house strikes at noon. Is it true, is it loud, and "
    "would it frighten {}?",
    "Coming back to the tower: how many steps are there, and what would you suggest to {} if the "
    "steps are too many?",
    "Is there a place where {} can sit down and eat the bread that we bring, or do you have a café "
    "of your own?",
    "If it rains, is there anything to do for {} in the neighbourhood, once we have seen it all?",
]


def programs(n: int, seed: int) -> Workload:
    """`n` conversations."""
    rng = random.Random(seed)
    return converse, [
        {"questions": [q.format(rng.choice(VISITORS)) for q in rng.sample(QUESTIONS, TURNS)]}
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    messages = state.messages()
    assert [m["role"] for m in messages] == ["system"] + ["user", "assistant"] * TURNS
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert answers == [state[f"answer_{turn}"] for turn in range(TURNS)]


if __name__ == "__main__":
    demo(programs, check)
