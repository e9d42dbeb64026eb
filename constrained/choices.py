"""A choice among fixed strings as a grammar: a tree of shared beginnings.

In a flat union an engine follows every string at once; in a tree it follows one branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phloem.constrained.base import LimitExceeded, MalformedConstraint
from phloem.constrained.grammar_text import EMPTY, GrammarWriter, LoweredGrammar, quote, sequence

MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 400_000
MAX_DEPTH = 100
RULES_A_WEIGHT = 16
"""Rules of a tree that weigh as much as one counted state: many of them are compiled lazily."""


def lower_choice(choices: Sequence[str]) -> LoweredGrammar:
    """The grammar of exactly these strings.

    Raises:
        MalformedConstraint: there are none, one is empty, or one appears twice.
        LimitExceeded: more than 10,000 strings or 400,000 characters, or beginnings too deep.
    """
    if not choices:
        raise MalformedConstraint("choice needs at least one string", code="empty_choice")
    if len(choices) > MAX_CHOICES:
        raise LimitExceeded(f"{len(choices)} choices; at most {MAX_CHOICES} are allowed")
    chars = sum(map(len, choices))
    if chars > MAX_CHOICE_CHARS:
        raise LimitExceeded(
            f"{chars} characters of choices; at most {MAX_CHOICE_CHARS} are allowed"
        )
    seen: set[str] = set()
    for i, text in enumerate(choices):
        if text == "":
            raise MalformedConstraint("a choice is the empty string", path=f"/{i}")
        if text in seen:
            raise MalformedConstraint("a choice appears twice", path=f"/{i}")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            raise MalformedConstraint("a choice has a lone surrogate", path=f"/{i}")
        seen.add(text)
    writer = GrammarWriter()
    return writer.finish(write_choice(choices, writer))


def write_choice(texts: Iterable[str], writer: GrammarWriter) -> str:
    """The name of a rule for exactly these strings, of which there is one at least.

    Raises:
        LimitExceeded: they begin with one another too deep.
    """
    before = writer.rules
    root = _tree(sorted(set(texts)), 0, 0, writer)
    writer.counted += (writer.rules - before) // RULES_A_WEIGHT
    return root


def _tree(texts: list[str], start: int, depth: int, writer: GrammarWriter) -> str:
    """An expression for sorted strings that are equal up to `start`, from there on."""
    if depth > MAX_DEPTH:
        raise LimitExceeded(f"choices begin with one another more than {MAX_DEPTH} deep")
    options = [EMPTY] if len(texts[0]) == start else []
    first = len(options)
    while first < len(texts):
        last = first + 1
        while last < len(texts) and texts[last][start] == texts[first][start]:
            last += 1
        branch = texts[first:last]
        shared = _shared(branch[0], branch[-1])
        rest = EMPTY if len(branch) == 1 else _tree(branch, shared, depth + 1, writer)
        options.append(sequence(quote(branch[0][start:shared]), rest))
        first = last
    return writer.rule(" | ".join(options), "tree")


def _shared(left: str, right: str) -> int:
    """How many characters two strings begin with alike."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
