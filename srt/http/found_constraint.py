"""A constraint as a request has it: where it was found, and how it lies in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import Raw

from phloem.constrained.spec import (
    Constraint,
    Continued,
    Deferred,
    JsonObject,
    JsonSchema,
    Plain,
    WithSchema,
)
from phloem.srt.http.body import given, invalid
from phloem.srt.http.protocol import ConstraintFields


@dataclass(frozen=True)
class Prelude:
    """Free text before a constrained one: up to the first `end`; with `begin`, only where the text
    begins so. At most `budget` tokens."""

    end: str
    begin: str = ""
    budget: int | None = None

    def deferred(self, constraint: Plain | None, seen: str = "") -> Constraint:
        """What the engine is to enforce, if the prompt ends in `seen`."""
        _, marker, rest = seen.partition(self.end)
        if marker and constraint is not None:
            return Continued(constraint=constraint, prefix=rest.lstrip("\n"))
        return Deferred(
            constraint=constraint, end=self.end, begin=self.begin, budget=self.budget, seen=seen
        )

    def behind(self, text: str) -> str | None:
        """The constrained part of a whole text; None when it has none."""
        skipper = PreludeSkipper(self)
        part = skipper.feed(text)
        return part if skipper.over else None


class PreludeSkipper:
    """Takes the free text from a text that comes in pieces; `over` says that there is no more."""

    def __init__(self, prelude: Prelude) -> None:
        self._end = prelude.end
        self._begin = prelude.begin
        self._held = ""
        self.over = False

    def feed(self, text: str) -> str:
        """The constrained part of more text."""
        if self.over:
            return text
        text, self._held = self._held + text, ""
        if self._begin:
            if self._begin.startswith(text) and text != self._begin:
                self._held = text
                return ""
            if not text.startswith(self._begin):
                self.over = True
                return text
            text, self._begin = text.removeprefix(self._begin), ""
        before, marker, behind = text.partition(self._end)
        if marker:
            self.over = True
            return behind
        self._held = before[-len(self._end) :]
        return ""


@dataclass(frozen=True)
class FoundConstraint:
    """A constraint, and the request field it came from: errors are reported under it.

    Not `strict`: what cannot be enforced of a schema is left out. The prompt ends in `prefix`,
    which belongs to the constrained text. The constraint holds behind `after`. `places` are parts
    of it that stand in request fields of their own: JSON pointer → field.
    """

    param: str
    constraint: Plain
    strict: bool = True
    prefix: str = ""
    after: Prelude | None = None
    places: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        return str(self.constraint.__struct_config__.tag)

    def for_engine(self, schema: str | None = None) -> Constraint:
        """What the engine is to enforce, with `schema` in place of the constraint's own."""
        inner = self.constraint
        if schema is not None and isinstance(inner, WithSchema):
            inner = msgspec.structs.replace(inner, schema=schema)
        if self.after is not None:
            return self.after.deferred(inner, self.prefix)
        return Continued(constraint=inner, prefix=self.prefix) if self.prefix else inner

    def constrained_part(self, text: str) -> str | None:
        """What of a whole output is held to the constraint, with the prefix; None for nothing."""
        whole = self.prefix + text
        if self.after is None:
            return whole
        part = self.after.behind(whole)
        return None if part is None else part.lstrip("\n")

    def field_of(self, path: str) -> tuple[str, str]:
        """The request's field that has a place in the constraint, and the path inside it."""
        for pointer, field in self.places:
            if path == pointer or path.startswith(f"{pointer}/"):
                return field, path.removeprefix(pointer)
        return self.param, path


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
            raise invalid(f"{lost} without a constraint.", lost)
        return None
    if whitespace is not None:
        if not isinstance(found.constraint, JsonSchema | JsonObject):
            raise invalid("Only JSON has whitespace to lay out.", "constraint_whitespace")
        constraint = msgspec.structs.replace(found.constraint, whitespace=whitespace)
        found = replace(found, constraint=constraint)
    if after is not None:
        if not after:
            raise invalid("constraint_after is empty.", "constraint_after")
        found = replace(found, after=Prelude(after))
    if prefixed:
        found = replace(found, prefix=_prefix(raw, texts))
    return found


def _prefix(raw: Raw, texts: Sequence[str | None]) -> str:
    """The prefix: a text in which every prompt ends, or with `true` the one text they all are."""
    name = "constraint_prefix"
    if None in texts:
        raise invalid(
            f"{name} needs a prompt of text, or an assistant's message that goes on"
            " (continue_final_message).",
            name,
        )
    known = [text for text in texts if text is not None]
    if bytes(raw) == b"true":
        if len(set(known)) != 1:
            raise invalid(f"{name} true needs one prompt.", name)
        return known[0]
    try:
        prefix = msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        raise invalid(f"{name} is a text or a boolean.", name) from None
    if not prefix:
        raise invalid(f"{name} is empty.", name)
    if not all(text.endswith(prefix) for text in known):
        raise invalid(f"The prompt does not end in {name}.", name)
    return prefix
