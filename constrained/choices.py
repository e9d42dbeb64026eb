"""A choice among fixed strings as a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.constrained.base import LimitExceeded, MalformedConstraint
from phloem.constrained.grammar_text import GrammarWriter, LoweredGrammar, choice, quote

MAX_CHOICES = 1_000
MAX_CHOICE_CHARS = 120_000


def lower_choice(choices: Sequence[str]) -> LoweredGrammar:
    """The grammar of exactly these strings.

    Raises:
        MalformedConstraint: there are none, one is empty, or one appears twice.
        LimitExceeded: more than 1,000 strings or 120,000 characters.
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
    return GrammarWriter().finish(choice([quote(c) for c in choices]))
