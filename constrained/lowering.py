"""One constraint → one grammar text: the dispatch over kinds of constraints."""

from __future__ import annotations

from phloem.constrained.choices import lower_choice
from phloem.constrained.ebnf import check_ebnf
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.regex import lower_regex
from phloem.constrained.schema import lower_json_object, lower_schema
from phloem.constrained.spec import Choice, Constraint, Ebnf, JsonObject, JsonSchema, Regex
from phloem.constrained.structural_tags import lower_tags

__all__ = ["LoweredGrammar", "lower", "lower_tags"]


def lower(constraint: Constraint) -> LoweredGrammar:
    """The grammar of a constraint that is not a structural tag (see `lower_tags`).

    Raises:
        ConstraintError: the constraint is refused.
    """
    match constraint:
        case JsonSchema(schema=schema, whitespace=whitespace):
            return lower_schema(schema, whitespace)
        case JsonObject(whitespace=whitespace):
            return lower_json_object(whitespace)
        case Regex(pattern=pattern):
            return lower_regex(pattern)
        case Choice(choices=choices):
            return lower_choice(choices)
        case Ebnf(grammar=grammar, root=root):
            return check_ebnf(grammar, root)
        case _:
            raise TypeError(f"{type(constraint).__name__} is not lowered to a grammar")
