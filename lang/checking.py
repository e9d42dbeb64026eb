"""Whether a finished text satisfies a constraint, as far as the client can tell by itself."""

from __future__ import annotations

import json

from phloem.constrained.spec import Choice, Constraint, Continued, JsonObject, JsonSchema, Regex


def satisfied(constraint: Constraint, text: str) -> bool | None:
    """None where it cannot be told. Of a JSON schema only that the text is JSON: the schema itself
    is the server's to enforce."""
    match constraint:
        case JsonSchema():
            return _parses(text)[0]
        case JsonObject():
            return isinstance(_parses(text)[1], dict)
        case Choice(choices=choices):
            return text in choices
        case Continued(constraint=inner, prefix=prefix):
            return satisfied(inner, prefix + text)
        case Regex(pattern=pattern):
            return _full_match(pattern, text)
        case _:
            return None


def _parses(text: str) -> tuple[bool, object]:
    try:
        return True, json.loads(text)
    except ValueError:
        return False, None


def _full_match(pattern: str, text: str) -> bool | None:
    """`re.fullmatch` in linear time: Python's own engine could hang the loop on some patterns. None
    for patterns with look-around and the like, and where jsonschema-rs is not installed."""
    try:
        import jsonschema_rs  # rarely needed, and no part of the client
    except ImportError:
        return None
    try:
        validator = jsonschema_rs.validator_for(
            {"type": "string", "pattern": f"^(?:{pattern})$"},
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except jsonschema_rs.ValidationError:
        return None
    return bool(validator.is_valid(text))
