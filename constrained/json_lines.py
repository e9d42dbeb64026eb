"""Several JSON documents of one schema → grammar: on lines of their own, or between fixed texts."""

from __future__ import annotations

from phloem.constrained.base import LimitExceeded, MalformedConstraint
from phloem.constrained.grammar_text import LoweredGrammar, quote, repeat, sequence
from phloem.constrained.schema import lower_schema
from phloem.constrained.spec import JsonDocuments, Whitespace

MAX_LINES = 10_000

_LINE = "jsonline"  # no name of the schema's own rules: those end in a number


def lower_json_lines(schema: str, low: int, high: int | None) -> LoweredGrammar:
    """The grammar of `low` to `high` lines, each a compact document that satisfies `schema`.

    Raises:
        ConstraintError: the schema is refused, or the numbers of lines make no sense.
    """
    if low < 1 or (high is not None and high < low):
        raise MalformedConstraint("at least one line, and no less lines at most than at least")
    if max(low, high or 0) > MAX_LINES:
        raise LimitExceeded(f"at most {MAX_LINES} counted lines are allowed")
    document = lower_schema(schema, Whitespace.COMPACT)
    more = repeat('("\\n" ' + _LINE + ")", low - 1, None if high is None else high - 1)
    counted = max(low, high or 0) if high != low or low > 1 else 0
    return _several(sequence(_LINE, more), document, counted)


def lower_json_documents(documents: JsonDocuments) -> LoweredGrammar:
    """The grammar of documents between fixed texts.

    Raises:
        ConstraintError: the schema is refused, or there are too many documents, or none.
    """
    most = documents.max_documents
    if most < 1:
        raise MalformedConstraint("at least one document")
    if most > MAX_LINES:
        raise LimitExceeded(f"at most {MAX_LINES} documents are allowed")
    document = lower_schema(documents.schema, Whitespace.SPACED)
    more = repeat(f"({quote(documents.separator)} {_LINE})", 0, most - 1)
    root = sequence(quote(documents.begin), _LINE, more, quote(documents.end))
    return _several(root, document, most - 1)


def _several(root: str, document: LoweredGrammar, counted: int) -> LoweredGrammar:
    """The grammar of `root`, in which `_LINE` is the document, with `counted` on top."""
    rules = document.text.replace("root ::=", f"{_LINE} ::=", 1)
    return LoweredGrammar(f"root ::= {root}\n{rules}", document.counted + counted)
