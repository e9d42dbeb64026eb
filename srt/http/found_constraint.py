"""A constraint as a request has it: where it was found, and how it lies in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from msgspec import Raw

from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Ebnf,
    JsonLines,
    JsonObject,
    JsonSchema,
    Plain,
    Regex,
    StructuralTag,
)
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import given
from phloem.srt.http.protocol import ConstraintFields

_INSIDE: Final = "/elements/2"  # of `_behind`'s tree
_GAP: Final = "\n{0,2}"  # between the marker and what is constrained


@dataclass(frozen=True)
class FoundConstraint:
    """A constraint, and the request field it came from: errors are reported under it.

    Not `strict`: what cannot be enforced of a schema is left out. The prompt ends in `prefix`,
    which belongs to the constrained text. With `after`, the constraint holds from the first `after`
    in the output on.
    """

    param: str
    constraint: Plain
    strict: bool = True
    prefix: str = ""
    after: str = ""

    @property
    def kind(self) -> str:
        return str(self.constraint.__struct_config__.tag)

    def for_engine(self, schema: str | None = None) -> Constraint:
        """What the engine is to enforce, with `schema` in place of the constraint's own."""
        inner = self.constraint
        if schema is not None and isinstance(inner, JsonSchema | JsonLines):
            inner = msgspec.structs.replace(inner, schema=schema)
        if self.after:
            inner = _behind(self.after, inner)
        return Continued(constraint=inner, prefix=self.prefix) if self.prefix else inner

    def inner_path(self, path: str) -> str:
        """A path into what the engine got, as one into the constraint."""
        return path.removeprefix(_INSIDE) if self.after else path


def placed(
    found: FoundConstraint | None, fields: ConstraintFields, texts: Sequence[str | None]
) -> FoundConstraint | None:
    """The constraint as `constraint_prefix`, `constraint_after` and `constraint_whitespace` want it
    placed. `texts` are what the prompts end in; None for one that nothing is known of.

    Raises:
        InvalidRequest: there is nothing to be placed, or no such prefix.
    """
    raw, after, whitespace = (
        fields.constraint_prefix,
        fields.constraint_after,
        fields.constraint_whitespace,
    )
    prefixed = given(raw) and bytes(raw) != b"false"
    wanted = {
        "constraint_prefix": prefixed,
        "constraint_after": after is not None,
        "constraint_whitespace": whitespace is not None,
    }
    if found is None:
        lost = next((name for name, there in wanted.items() if there), None)
        if lost is not None:
            raise _invalid(f"{lost} without a constraint.", lost)
        return None
    if whitespace is not None:
        if not isinstance(found.constraint, JsonSchema | JsonObject):
            raise _invalid("Only JSON has whitespace to lay out.", "constraint_whitespace")
        constraint = msgspec.structs.replace(found.constraint, whitespace=whitespace)
        found = replace(found, constraint=constraint)
    if after is not None:
        if not after:
            raise _invalid("constraint_after is empty.", "constraint_after")
        if whitespace is not None:
            raise _invalid("Behind a marker the whitespace is fixed.", "constraint_whitespace")
        if isinstance(found.constraint, StructuralTag | JsonLines):
            raise _invalid(f"A {found.kind} cannot follow a marker.", "constraint_after")
        found = replace(found, after=after)
    if prefixed:
        found = replace(found, prefix=_prefix(raw, texts))
    return found


def _prefix(raw: Raw, texts: Sequence[str | None]) -> str:
    """The prefix: a text in which every prompt ends, or with `true` the one text they all are."""
    name = "constraint_prefix"
    if None in texts:
        raise _invalid(
            f"{name} needs a prompt of text, or an assistant's message that goes on"
            " (continue_final_message).",
            name,
        )
    known = [text for text in texts if text is not None]
    if bytes(raw) == b"true":
        if len(set(known)) != 1:
            raise _invalid(f"{name} true needs one prompt.", name)
        return known[0]
    try:
        prefix = msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        raise _invalid(f"{name} is a text or a boolean.", name) from None
    if not prefix:
        raise _invalid(f"{name} is empty.", name)
    if not all(text.endswith(prefix) for text in known):
        raise _invalid(f"The prompt does not end in {name}.", name)
    return prefix


def _behind(marker: str, constraint: Plain) -> StructuralTag:
    """Any text up to the first `marker`, then the constraint."""
    prelude = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marker}
    gap = {"type": "regex", "pattern": _GAP}
    tree = {"type": "sequence", "elements": [prelude, gap, _part(constraint)]}
    return StructuralTag(format=msgspec.json.encode(tree).decode())


def _part(constraint: Plain) -> dict[str, object]:
    """A constraint as a node of a `format` tree."""
    match constraint:
        case JsonSchema(schema=schema):
            return {"type": "json_schema", "json_schema": Raw(schema.encode())}
        case JsonObject():
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case Regex(pattern=pattern):
            return {"type": "regex", "pattern": pattern}
        case Ebnf(grammar=grammar):
            return {"type": "grammar", "grammar": grammar}
        case Choice(choices=choices):
            texts = [{"type": "const_string", "value": choice} for choice in choices]
            return {"type": "or", "elements": texts}
        case _:
            raise AssertionError("refused by `placed`")


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
