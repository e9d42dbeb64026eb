"""Answers from documents, with citations: only ids of documents that were given can be cited.

Documents stand in the prompt in a fixed order, not by rank, so that questions which find the same
ones share what was computed.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from demo import Workload, demo

import phloem

HANDBOOK = {
    path.stem: path.read_text(encoding="utf-8").strip()
    for path in sorted(Path(__file__).with_name("handbook").glob("*.txt"))
}
FOUND = 3


def words(text: str) -> set[str]:
    return set(re.findall("[a-z]{4,}", text.lower()))


def retrieve(question: str) -> list[str]:
    """Ids of the documents that share the most words with the question."""
    shared = {name: len(words(text) & words(question)) for name, text in HANDBOOK.items()}
    return sorted(sorted(shared, key=lambda name: -shared[name])[:FOUND])


def cited(ids: list[str]) -> dict[str, Any]:
    """Schema of an answer that cites one or two of the documents `ids`."""
    citations = {"type": "array", "items": {"enum": ids}, "minItems": 1, "maxItems": 2}
    return {
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 200}, "citations": citations},
        "required": ["answer", "citations"],
        "additionalProperties": False,
    }


@phloem.function
def answer(s: phloem.State, question: str) -> dict[str, Any]:
    ids = retrieve(question)
    documents = "\n\n".join(f"[{name}] {HANDBOOK[name]}" for name in ids)
    s += phloem.system("You answer from the documents alone, as JSON, and cite what you used.")
    s += phloem.user(f"{documents}\n\nQuestion: {question}")
    s += phloem.assistant(
        phloem.gen("reply", json_schema=cited(ids), max_tokens=260, temperature=0.0)
    )
    s["documents"] = ids
    reply: dict[str, Any] = json.loads(s["reply"])
    return reply


QUESTIONS = [
    "How long may I keep a {} that I have borrowed?",
    "What does it cost when a {} comes back late or damaged?",
    "Can I reserve a {} that somebody else has borrowed?",
    "Where do I return a {} when the library is closed?",
    "May a visitor from another town borrow a {}?",
    "Who repairs a {} in the workshop, and when is the workshop open?",
    "Can I borrow a {} for a child, with the child's own card?",
]
THINGS = ["drill", "sewing machine", "telescope", "ladder", "film projector", "bread oven", "tent"]
ASKERS = ["sister", "neighbour", "aunt", "band", "choir", "football team", "class"]


def programs(n: int, seed: int) -> Workload:
    """`n` questions about the handbook."""
    rng = random.Random(seed)
    return answer, [
        {
            "question": rng.choice(QUESTIONS).format(rng.choice(THINGS))
            + f" It is for my {rng.choice(ASKERS)}."
        }
        for _ in range(n)
    ]


def check(state: phloem.State) -> None:
    reply = json.loads(state["reply"])
    assert 1 <= len(reply["citations"]) <= 2
    assert set(reply["citations"]) <= set(state["documents"]) <= set(HANDBOOK)


if __name__ == "__main__":
    demo(programs, check)
