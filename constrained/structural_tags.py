"""Structural tags: free text with constrained pieces, as xgrammar's tag format.

The tree is passed on with each schema, regular expression and grammar in it replaced by a grammar
of ours, so that pieces are as exact as constraints of their own. Both spellings are taken: a
`format` tree, and the older `structures` with `triggers`.
"""

from __future__ import annotations

import json
from typing import Any

from phloem.constrained.base import ConstraintError, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.ebnf import check_ebnf
from phloem.constrained.regex import lower_regex
from phloem.constrained.schema import lower_schema
from phloem.constrained.schema_document import join, parse_json
from phloem.constrained.spec import Whitespace

_PLAIN = {
    "const_string",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
    "optional",
    "plus",
    "star",
    "repeat",
}
_SCHEMA_FIELDS = {"type", "json_schema", "style"}


def lower_tags(text: str) -> str:
    """A structural tag (JSON text) for the engine, as JSON text.

    Raises:
        ConstraintError: malformed, or a piece of it is refused; the path points into the tag.
    """
    tag = parse_json(text)
    if not isinstance(tag, dict):
        raise MalformedConstraint("a structural tag is a JSON object")
    if "structures" in tag:
        tag = _from_structures(tag)
    if tag.get("type") == "structural_tag":
        tag = {**tag, "format": _lower(tag.get("format"), "/format")}
    else:
        tag = {"type": "structural_tag", "format": _lower(tag, "")}
    return json.dumps(tag, ensure_ascii=False)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    try:
        tags = [
            {
                "type": "tag",
                "begin": s["begin"],
                "content": {"type": "json_schema", "json_schema": s["schema"]},
                "end": s["end"],
            }
            for s in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise MalformedConstraint(
            "structures need begin, schema and end each, and triggers beside them"
        ) from error


def _lower(part: Any, path: str) -> Any:
    if not isinstance(part, dict):
        raise MalformedConstraint("a format is a JSON object", path=path)
    kind = part.get("type")
    try:
        match kind:
            case "json_schema":
                return _grammar(_schema(part))
            case "regex":
                return _grammar(lower_regex(str(part.get("pattern"))).text)
            case "grammar":
                return _grammar(_unambiguous(str(part.get("grammar"))))
    except ConstraintError as error:
        raise type(error)(error.message, path=path + error.path, code=error.reason) from error
    if kind not in _PLAIN:
        raise UnsupportedKeyword("format type is not supported", path=join(path, "type"))
    lowered = dict(part)
    for key in ("content", "separator"):
        if isinstance(part.get(key), dict):
            lowered[key] = _lower(part[key], join(path, key))
    for key in ("elements", "tags"):
        if isinstance(part.get(key), list):
            lowered[key] = [_lower(p, join(path, key, i)) for i, p in enumerate(part[key])]
    return lowered


def _unambiguous(text: str) -> str:
    grammar = check_ebnf(text)
    if grammar.ambiguous:
        raise UnsupportedKeyword(grammar.ambiguous, code="ambiguous_grammar")
    return grammar.text


def _schema(part: dict[str, Any]) -> str:
    unknown = sorted(set(part) - _SCHEMA_FIELDS)
    if unknown or part.get("style", "json") != "json":
        raise UnsupportedKeyword(
            f"json_schema with {unknown[0] if unknown else 'style'} is not supported"
        )
    schema = json.dumps(part.get("json_schema"), ensure_ascii=False)
    return lower_schema(schema, Whitespace.BOUNDED).text


def _grammar(text: str) -> dict[str, str]:
    return {"type": "grammar", "grammar": text}
