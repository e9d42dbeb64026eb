"""One constraint → one grammar text: the dispatch over kinds of constraints."""

from __future__ import annotations

import dataclasses

from phloem.constrained.base import MalformedConstraint
from phloem.constrained.choices import lower_choice
from phloem.constrained.ebnf import check_ebnf
from phloem.constrained.grammar_text import Deferral, LoweredGrammar
from phloem.constrained.json_lines import lower_json_documents, lower_json_lines
from phloem.constrained.regex import lower_regex
from phloem.constrained.schema import lower_json_object, lower_schema
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Deferred,
    Ebnf,
    JsonDocuments,
    JsonLines,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)
from phloem.constrained.structural_tags import lower_tags

__all__ = ["LoweredGrammar", "lower"]


def lower(constraint: Constraint) -> LoweredGrammar:
    """The grammar of a constraint.

    Raises:
        ConstraintError: the constraint is refused.
    """
    match constraint:
        case JsonSchema(schema=schema, whitespace=whitespace):
            return lower_schema(schema, whitespace)
        case JsonObject(whitespace=whitespace):
            return lower_json_object(whitespace)
        case JsonLines(schema=schema, min_lines=low, max_lines=high):
            return lower_json_lines(schema, low, high)
        case JsonDocuments():
            return lower_json_documents(constraint)
        case Regex(pattern=pattern):
            return lower_regex(pattern)
        case Choice(choices=choices):
            return lower_choice(choices)
        case Ebnf(grammar=grammar, root=root):
            return check_ebnf(grammar, root)
        case StructuralTag(format=tag):
            return LoweredGrammar(lower_tags(tag), counted=0, is_tag=True)
        case Continued(constraint=whole, prefix=prefix):
            return dataclasses.replace(lower(whole), prefix=prefix)
        case Deferred():
            return _deferred(constraint)


def _deferred(constraint: Deferred) -> LoweredGrammar:
    budget = constraint.budget
    if not constraint.end or constraint.end in constraint.seen or (budget or 0) < 0:
        raise MalformedConstraint(
            "free text needs an end that is to come, and a budget of 0 or more"
        )
    inner = LoweredGrammar("", 0) if constraint.constraint is None else lower(constraint.constraint)
    deferral = Deferral(constraint.end, constraint.begin, budget, constraint.seen)
    return dataclasses.replace(inner, deferral=deferral)
