"""A regular expression as a grammar, with the meaning of `re.fullmatch` (ASCII shorthands).

`.` is any character but a line feed; one `^…$` around the whole, or around an alternative, says
nothing and is dropped. What is refused, and why, stands in `pattern_parser`.
"""

from __future__ import annotations

from phloem.constrained.grammar_text import (
    GrammarWriter,
    LoweredGrammar,
    char_class,
    write_pattern,
)
from phloem.constrained.pattern import Node, close_full
from phloem.constrained.pattern_parser import Dialect, parse


def parse_regex(pattern: str) -> Node:
    """The closed tree of a `regex` constraint.

    Raises:
        ConstraintError: malformed, unsupported or too large.
    """
    return close_full(parse(pattern, Dialect.PYTHON))


def lower_regex(pattern: str) -> LoweredGrammar:
    """The grammar of all strings that match `pattern` as a whole.

    Raises:
        ConstraintError: malformed, unsupported or too large.
    """
    writer = GrammarWriter()
    return writer.finish(write_pattern(parse_regex(pattern), char_class, writer))
