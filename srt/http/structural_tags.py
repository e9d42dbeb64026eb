"""Structural tags: free text with constrained islands, in the old spelling and the new."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from phloem.constrained.spec import StructuralTag
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import ABSENT, given
from phloem.srt.http.constraint_values import convert, schema_text


class _Structure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: Raw = ABSENT


class _TagSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The new form is a `format` tree, the old one a list of structures behind triggers."""

    type: str = "structural_tag"
    format: Raw = ABSENT
    structures: list[_Structure] | None = None
    triggers: list[str] | None = None
    at_least_one: bool = False
    stop_after_first: bool = False


def read_structural_tag(text: bytes, param: str) -> StructuralTag:
    spec = convert(Raw(text), _TagSpec, param)
    if given(spec.format):
        if spec.type != "structural_tag" or spec.structures is not None:
            raise InvalidRequest(
                f"{param} wants either a `format` or `structures`.",
                param=param,
                code="invalid_value",
            )
        return StructuralTag(format=bytes(spec.format).decode())
    if not spec.structures or not spec.triggers:
        raise InvalidRequest(
            f"{param} wants a `format`, or `structures` with `triggers`.",
            param=param,
            code="missing_constraint",
        )
    tags = [
        tag(one.begin, schema_text(one.schema, f"{param}.structures[{i}].schema"), one.end)
        for i, one in enumerate(spec.structures)
    ]
    return triggered_tags(
        spec.triggers,
        tags,
        at_least_one=spec.at_least_one,
        stop_after_first=spec.stop_after_first,
    )


def tag(begin: str, schema: str, end: str) -> dict[str, object]:
    """A node of a `format` tree: JSON that satisfies `schema`, between two fixed strings."""
    content = {"type": "json_schema", "json_schema": Raw(schema.encode())}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered_tags(
    triggers: list[str],
    tags: list[dict[str, object]],
    *,
    at_least_one: bool,
    stop_after_first: bool,
) -> StructuralTag:
    """Free text in which each trigger starts one of the tags."""
    tree = {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }
    return StructuralTag(format=msgspec.json.encode(tree).decode())
