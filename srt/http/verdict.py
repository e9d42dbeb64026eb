"""Does a finished answer satisfy its constraint? Said by a validator, not by the grammar engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from phloem.constrained.base import ConstraintError
from phloem.constrained.relax import MAX_LISTED
from phloem.constrained.spec import (
    Choice,
    JsonObject,
    Plain,
    WithSchema,
)
from phloem.constrained.validate import Violation, validate, validator_of


@dataclass(frozen=True)
class Verdict:
    """`valid` is None where nobody can say; `reason` names the keyword and the place."""

    valid: bool | None
    reason: str = ""


UNKNOWN: Final = Verdict(None)


def judge(constraint: Plain, text: str) -> Verdict:
    """Put a whole text to the validator of its constraint.

    JSON is read as most parsers read it: of a repeated key the last counts.
    """
    if not isinstance(constraint, WithSchema | JsonObject | Choice):
        return UNKNOWN
    try:
        validate(constraint, text, _parse)
    except Violation as violation:
        return Verdict(False, str(violation))
    except (ConstraintError, ValueError, RecursionError, OverflowError):
        return UNKNOWN  # too deep, too large a number, half a surrogate pair
    return Verdict(True)


def annotated(constraint: Plain) -> list[str]:
    """Pointers of a schema's keywords that nobody checks, for they are annotations."""
    if not isinstance(constraint, WithSchema):
        return []
    try:
        return list(validator_of(constraint.schema).annotations[:MAX_LISTED])
    except ConstraintError:
        return []


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        raise Violation(f"the text is not JSON: {error.msg}") from error


def _not_json(name: str) -> NoReturn:
    raise Violation(f"the text is not JSON: {name}")
