"""A regular expression as a grammar, with the meaning of `re.fullmatch` (ASCII shorthands).

`.` is any character but a line feed; one `^…$` around the whole, or around an alternative, says
nothing and is dropped; look-around, word boundaries and inner anchors mean what they mean. What is
refused, and why, stands in `pattern_parser`.
"""

from __future__ import annotations

from phloem.constrained.base import MalformedConstraint
from phloem.constrained.grammar_text import (
    GrammarWriter,
    LoweredGrammar,
    char_class,
    write_pattern,
)
from phloem.constrained.pattern import Automaton, Node
from phloem.constrained.pattern_closing import close_full
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
    node = parse_regex(pattern)
    if isinstance(node, Automaton) and node.is_empty:
        raise MalformedConstraint("no string matches the regular expression", code="unsatisfiable")
    return writer.finish(write_pattern(node, char_class, writer))
