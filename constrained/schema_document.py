"""A JSON schema as a checked document: parsed strictly, within limits, references resolved.

Nothing here decides what can be enforced; `phloem.constrained.schema_shapes` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_annotations import annotations_of
from phloem.constrained.schema_node import MANY, MAPS, ONE, Node, join
from phloem.constrained.schema_references import References

__all__ = ["Node", "SchemaDocument", "finite", "join", "parse_json"]

MAX_SCHEMA_BYTES = 256 << 10
MAX_JSON_DEPTH = 96
MAX_SCHEMA_DEPTH = 32
MAX_PROPERTIES = 5_000
MAX_ENUM_VALUES = 1_000
MAX_NAME_CHARS = 120_000
MAX_BRANCHES = 256

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DIALECTS = {
    "json-schema.org/draft-04/schema",
    "json-schema.org/draft-06/schema",
    "json-schema.org/draft-07/schema",
    "json-schema.org/draft/2019-09/schema",
    "json-schema.org/draft/2020-12/schema",
    "json-schema.org/schema",
}
_DRAFT_4 = "json-schema.org/draft-04/schema"
_REF_ALONE = {f"json-schema.org/draft-0{n}/schema" for n in (4, 6, 7)}


def parse_json(text: str) -> Any:
    """Strict JSON: no duplicate keys, no NaN, no infinite numbers, bounded depth.

    Raises:
        MalformedConstraint: not strict JSON.
        LimitExceeded: too deep.
    """
    depth = deepest = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted, escaped = escaped or char != '"', char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    if deepest > MAX_JSON_DEPTH:
        raise LimitExceeded(
            f"the JSON nests {deepest} levels; at most {MAX_JSON_DEPTH} are allowed"
        )
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedConstraint(f"not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:80]!r}")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class SchemaDocument:
    """A whole schema. Raises `ConstraintError` when it is malformed or too large."""

    def __init__(self, text: str) -> None:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_SCHEMA_BYTES:
            raise LimitExceeded(
                f"the schema's text has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed"
            )
        schema = parse_json(text)
        if not isinstance(schema, dict | bool):
            raise MalformedConstraint("a schema is an object or a boolean")
        self.root = Node("", schema=schema)
        self.annotations: list[tuple[str, str]] = []
        """Keywords that restrict nothing although they may seem to, by path, and why."""
        self._validators: dict[Node, jsonschema_rs.Validator] = {}
        if isinstance(schema, dict):
            self._check_dialect(schema)
        draft = _draft(self.root.schema) if isinstance(self.root.schema, dict) else ""
        self.ref_alone = draft in _REF_ALONE
        """Whether keywords beside `$ref` mean nothing, as up to draft 7."""
        self.references = References(self.root, draft_4=draft == _DRAFT_4, ref_alone=self.ref_alone)
        self._check_size()

    def _check_dialect(self, schema: dict[str, Any]) -> None:
        named = schema.get("$schema")
        if named is not None and _draft(schema) not in _DIALECTS:
            raise UnsupportedKeyword("unknown schema dialect in $schema", path="/$schema")
        error = _meta_error(schema)
        if error is not None and named is None and _meta_error(_as_draft_7(schema)) is None:
            self.root = Node("", schema=_as_draft_7(schema))
        elif error is not None:
            path = join("", *error.instance_path)
            raise MalformedConstraint(
                f"invalid schema: the value of {error.instance_path[-1]!r} is not allowed there"
                if error.instance_path
                else "invalid schema",
                path=path,
            )

    def _check_size(self) -> None:
        properties = values = chars = 0
        for node, depth in self._walk():
            schema = node.schema
            assert isinstance(schema, dict)
            if depth > MAX_SCHEMA_DEPTH:
                raise LimitExceeded(
                    f"the schema nests deeper than {MAX_SCHEMA_DEPTH} levels", path=node.pointer
                )
            names = schema.get("properties", {})
            listed = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
            properties += len(names)
            values += len(listed)
            chars += sum(map(len, names))
            chars += sum(len(json.dumps(v, ensure_ascii=False)) for v in listed)
            for key in ("anyOf", "oneOf", "allOf"):
                _limit(len(schema.get(key, ())), MAX_BRANCHES, f"branches of {key}", node.at(key))
            self.references.enter(node)
            self.annotations += annotations_of(node, schema)
        _limit(properties, MAX_PROPERTIES, "properties in all")
        _limit(values, MAX_ENUM_VALUES, "enum and const values in all")
        _limit(chars, MAX_NAME_CHARS, "characters of property names, enum and const values")

    def _walk(self) -> Iterator[tuple[Node, int]]:
        """Every object subschema with its depth, the root first."""
        pending = [(self.root, 1)]
        while pending:
            node, depth = pending.pop()
            if not isinstance(node.schema, dict):
                continue
            yield node, depth
            below = [(node.child(*keys), depth + 1) for keys in _children(node.schema)]
            pending.extend(reversed(below))

    def resolve(self, ref: str, node: Node) -> Node:
        """The target of a `$ref` that stands in `node`.

        Raises:
            UnsupportedKeyword: the reference leaves the document.
            MalformedConstraint: there is nothing at its end.
        """
        return self.references.resolve(ref, node)

    def resolve_dynamic(self, ref: str, node: Node) -> Node:
        """The target of a `$dynamicRef` that stands in `node`, if it has but one.

        Raises:
            As `resolve`.
        """
        return self.references.resolve_dynamic(ref, node)

    def admits(self, node: Node, value: Any) -> bool:
        """Whether the schema at `node` accepts `value`, by an independent validator."""
        positive = dataclasses.replace(node, negated=False)
        validator = self._validators.get(positive)
        if validator is None:
            validator = self._validator(positive)
            self._validators[positive] = validator
        return bool(validator.is_valid(value)) is not node.negated

    def _validator(self, node: Node) -> jsonschema_rs.Validator:
        if isinstance(node.schema, bool):
            return jsonschema_rs.validator_for(node.schema)
        assert isinstance(self.root.schema, dict)
        dialect = self.root.schema.get("$schema")
        wrapper: dict[str, Any] = {"allOf": [{"$ref": self.references.locate(node.pointer)}]}
        if dialect is not None:
            wrapper["$schema"] = dialect

        def retrieve(uri: str) -> Any:
            found = self.references.resource(uri)
            if found is None:
                raise ValueError("the schema leaves its document")
            return found

        try:
            return jsonschema_rs.validator_for(wrapper, retriever=retrieve, validate_formats=True)
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise MalformedConstraint("invalid schema", path=node.pointer) from error


def _draft(schema: dict[str, Any]) -> str:
    return str(schema.get("$schema", "")).removesuffix("#").partition("://")[2]


def _as_draft_7(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": _DRAFT_7, **schema}


def _meta_error(schema: dict[str, Any]) -> jsonschema_rs.ValidationError | None:
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        return error
    return None


def _limit(count: int, limit: int, what: str, path: str = "") -> None:
    if count > limit:
        raise LimitExceeded(f"{count} {what}; at most {limit} are allowed", path=path)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    for key in ONE:
        if isinstance(schema.get(key), dict):
            yield (key,)
    for key in MANY:
        if isinstance(schema.get(key), list):
            yield from ((key, i) for i in range(len(schema[key])))
    for key in MAPS:
        if isinstance(schema.get(key), dict):
            yield from ((key, k) for k, v in schema[key].items() if isinstance(v, dict))


def finite(value: object) -> bool:
    """False for a float that overflowed when it was parsed."""
    return not isinstance(value, float) or math.isfinite(value)
