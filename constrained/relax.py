"""The part of a schema that can be enforced, when the request allows less than all of it.

An engine refuses a schema by the pointer of what it cannot enforce. `RelaxedSchema.drop` takes
that out, and nothing else, in such a way that every instance of the schema before is one of the
schema after: so enforcing the rest is never wrong, only less. What only says more the less is
accepted below it (`not`, `if`, `oneOf`, a `contains` with a maximum) goes before anything inside
it does; `oneOf` becomes `anyOf`. What was taken out is left to a validator, where one knows it.
"""

from __future__ import annotations

import copy
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from phloem.constrained.schema_document import parse_json
from phloem.constrained.schema_keywords import ASSERTIONS
from phloem.constrained.schema_node import MANY, MAPS, ONE, join

MAX_LISTED: Final = 256

VALIDATED_FORMATS: Final = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    )
)
"""Formats that the validator knows."""

_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_LISTED: Final = frozenset([*ASSERTIONS, *_REFERENCES])
_UNEVALUATED: Final = ("unevaluatedItems", "unevaluatedProperties")

# Taking one of these out alone would leave others that mean more without it.
_TOGETHER: Final = {
    "if": ("if", "then", "else"),
    "contains": ("contains", "minContains", "maxContains"),
    "minContains": ("contains", "minContains", "maxContains"),
    "maxContains": ("contains", "minContains", "maxContains"),
    "minimum": ("minimum", "exclusiveMinimum"),
    "maximum": ("maximum", "exclusiveMaximum"),
    "prefixItems": ("prefixItems", "items"),
    "items": ("items", "additionalItems"),
    "properties": ("properties", "additionalProperties"),
    "patternProperties": ("patternProperties", "additionalProperties"),
}
# They identify or hold: alone, they restrict nothing.
_KEPT: Final = ("$schema", "$id", "id", "$anchor", "$defs", "definitions")
_STRICT: Final = ("not", "if", "oneOf")
# All but these tell which members they evaluated, or hold what does.
_NOT_EVALUATING: Final = _LISTED - {*ONE, *MANY, *MAPS, *_REFERENCES} | {
    "not",
    "oneOf",
    "propertyNames",
}

Steps = tuple[str, ...]


class RelaxedSchema:
    """A schema from which keywords are taken out one by one.

    Raises `MalformedConstraint` when `text` is not strict JSON.
    """

    def __init__(self, text: str) -> None:
        self._original = parse_json(text)
        self._schema = copy.deepcopy(self._original)
        self._weakened: set[str] = set()  # still there, as something weaker
        self._unknown: set[str] = set()  # no keyword of JSON Schema
        self._renamed: list[tuple[str, str]] = []  # pointer now, pointer in the original

    @property
    def text(self) -> str:
        """The schema as it is now."""
        return json.dumps(self._schema, ensure_ascii=False)

    def drop(self, pointer: str) -> bool:
        """Take out the keyword at `pointer`, or what stands in its way; False when that cannot be
        done without narrowing, or when there is nothing there."""
        found = self._locate(pointer)
        if found is None:
            return False
        node, _ = found
        sites = self._in_the_way([node]) or [found]
        if any(key not in _NOT_EVALUATING for _, key in sites) and self._drop_unevaluated():
            return True
        taken = [self._take_out(site, key) for site, key in sites]
        return any(taken)

    # ------------------------------------------------------------------ the report

    def enforced(self) -> list[str]:
        """Pointers into the original schema of the keywords that are in force, at most
        `MAX_LISTED`."""
        return sorted(self._in_force())[:MAX_LISTED]

    def validated(self) -> list[str]:
        """The same, of what was taken out and a validator knows; of nested ones the outer."""
        return [p for p in self._missing() if not self._unvalidated(p)][:MAX_LISTED]

    def unsupported(self) -> list[str]:
        """The same, of what was taken out and nobody checks."""
        return self._unchecked()[:MAX_LISTED]

    def checked_schema(self) -> str:
        """The schema that finished texts are put to: the original without `unsupported`."""
        schema = copy.deepcopy(self._original)
        for pointer in self._unchecked():
            *above, key = _steps(pointer)
            parent = _at(schema, tuple(above))
            if key == "$ref" and _ref_alone(schema):
                parent.clear()  # what stands beside it never meant anything
            else:
                parent.pop(key, None)
        return json.dumps(schema, ensure_ascii=False)

    def _in_force(self) -> set[str]:
        now = {self._before(p) for p in _keywords(self._schema)}
        return (now & set(_keywords(self._original))) - self._weakened

    def _missing(self) -> list[str]:
        missing = set(_keywords(self._original)) - self._in_force()
        gone = missing - self._weakened
        return sorted(p for p in missing if not any(above in gone for above in _above(p)))

    def _unchecked(self) -> list[str]:
        return sorted({p for p in self._missing() if self._unvalidated(p)} | self._unknown)

    def _unvalidated(self, pointer: str) -> bool:
        steps = _steps(pointer)
        value = _at(self._original, steps)
        if steps[-1] == "format":
            return value not in VALIDATED_FORMATS
        if steps[-1] == "$ref":
            return not str(value).startswith("#")
        return False

    def _before(self, pointer: str) -> str:
        for now, then in reversed(self._renamed):
            if pointer == now or pointer.startswith(now + "/"):
                pointer = then + pointer[len(now) :]
        return pointer

    # ------------------------------------------------------------------ where

    def _locate(self, pointer: str) -> tuple[Steps, str] | None:
        """The subschema a pointer leads to, and the keyword of it; "" for all of it."""
        steps = _steps(pointer)
        node: Steps = ()
        while len(node) < len(steps):
            schema = _at(self._schema, node)
            if not isinstance(schema, dict):
                return None
            rest = steps[len(node) :]
            key = rest[0]
            if key not in schema:
                return None
            width = _width(key, schema[key])
            if width == 0 or len(rest) < width:
                return node, key
            below = steps[: len(node) + width]
            if key == "patternProperties" and len(rest) == width:
                return node, key
            if (key, *rest[1:width]) not in _children(schema):
                return None
            if not isinstance(_at(self._schema, below), dict | bool):
                return node, key  # the names that another name depends on
            node = below
        return (node, "") if isinstance(_at(self._schema, node), dict) else None

    def _in_the_way(self, wanted: list[Steps]) -> list[tuple[Steps, str]]:
        """Keywords that accept less when one of `wanted`, which is below them, accepts more: those
        met first on the ways from the root."""
        graph = _Graph(self._schema)
        above = graph.leading_to(wanted)
        sites: list[tuple[Steps, str]] = []
        pending: list[Steps] = [()]
        seen: set[Steps] = set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            schema = graph.nodes[node]
            strict = set(_STRICT) & set(schema)
            strict |= {"contains"} & set(schema) if "maxContains" in schema else set()
            for steps in _children(schema):
                child = (*node, *steps)
                if steps[0] in strict and child in above:
                    sites.append((node, steps[0]))
                elif steps[0] not in strict and steps[0] not in ("$defs", "definitions"):
                    pending += [child] if child in graph.nodes else []
            pending += graph.targets[node]
        return sorted(set(sites))

    # ------------------------------------------------------------------ taking out

    def _take_out(self, node: Steps, keyword: str) -> bool:
        schema = _at(self._schema, node)
        assert isinstance(schema, dict)
        before = self.text
        if keyword == "oneOf":
            self._one_of_to_any_of(node, schema)
        elif keyword in _KEPT:
            return False  # without it the rest would mean something else
        elif keyword == "" or (keyword in _REFERENCES and _ref_alone(self._schema)):
            self._take_all_out(schema)
        else:
            if keyword not in _LISTED:
                self._unknown.add(self._before(join("", *node, keyword)))
            for key in _TOGETHER.get(keyword, (keyword,)):
                schema.pop(key, None)
        return self.text != before

    def _take_all_out(self, schema: dict[str, Any]) -> None:
        """All but the type; and that, too, if it is alone, or means nothing beside a `$ref`."""
        kept = {k: v for k, v in schema.items() if k in _KEPT}
        restricts = [key for key in schema if key in _LISTED]
        if "type" in restricts and len(restricts) > 1 and "$ref" not in restricts:
            kept["type"] = schema["type"]
        schema.clear()
        schema.update(kept)

    def _one_of_to_any_of(self, node: Steps, schema: dict[str, Any]) -> None:
        """In its place among the keywords: the order of `properties` beside it is that of keys."""
        pointer = join("", *node)
        self._weakened.add(self._before(pointer + "/oneOf"))
        branches = schema["oneOf"]
        if "anyOf" not in schema:
            items = [("anyOf" if k == "oneOf" else k, v) for k, v in schema.items()]
            schema.clear()
            schema.update(items)
            self._renamed.append((pointer + "/anyOf", pointer + "/oneOf"))
            return
        del schema["oneOf"]
        among = schema.setdefault("allOf", [])
        self._renamed.append((f"{pointer}/allOf/{len(among)}/anyOf", pointer + "/oneOf"))
        among.append({"anyOf": branches})

    def _drop_unevaluated(self) -> bool:
        """These would now refuse what the keyword that goes used to evaluate."""
        nodes = [node for node in _nodes(self._schema) if self._has_unevaluated(node)]
        if not nodes:
            return False
        while sites := self._in_the_way(nodes):
            for site, key in sites:
                self._take_out(site, key)
            nodes = [node for node in _nodes(self._schema) if self._has_unevaluated(node)]
        for node in nodes:
            for key in _UNEVALUATED:
                _at(self._schema, node).pop(key, None)
        return True

    def _has_unevaluated(self, node: Steps) -> bool:
        schema = _at(self._schema, node)
        return isinstance(schema, dict) and any(key in schema for key in _UNEVALUATED)


class _Graph:
    """A schema's subschemas by their steps, and where their references lead."""

    def __init__(self, schema: Any) -> None:
        self.nodes: dict[Steps, dict[str, Any]] = {}
        anchors: dict[str, Steps] = {}
        for node in _nodes(schema):
            value = _at(schema, node)
            if isinstance(value, dict):
                self.nodes[node] = value
                anchors[str(value.get("$anchor"))] = node
        self.targets: dict[Steps, list[Steps]] = {}
        self._anywhere: list[Steps] = []  # refer to what is not known
        for node, value in self.nodes.items():
            self.targets[node] = []
            for key in set(_REFERENCES) & set(value):
                ref = str(value[key])
                fragment = urllib.parse.unquote(ref[1:])
                plain = fragment and not fragment.startswith("/")
                target = anchors.get(fragment) if plain else _steps(fragment)
                if key == "$ref" and ref.startswith("#") and target in self.nodes:
                    self.targets[node].append(target)
                else:
                    self._anywhere.append(node)

    def leading_to(self, wanted: list[Steps]) -> set[Steps]:
        """The subschemas that one of `wanted` is below, directly or by reference; with these."""
        referring: dict[Steps, list[Steps]] = {}
        for node, targets in self.targets.items():
            for target in targets:
                referring.setdefault(target, []).append(node)
        found: set[Steps] = set()
        pending = [*wanted, *self._anywhere]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            pending += referring.get(node, ())
            pending += [node[:-n] for n in (1, 2) if node and node[:-n] in self.nodes]
        return found


def _ref_alone(schema: Any) -> bool:
    """Whether keywords beside `$ref` mean nothing, or may mean nothing."""
    dialect = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    return "2019-09" not in dialect and "2020-12" not in dialect


def _width(key: str, value: Any) -> int:
    """How many steps lead from a schema over this keyword to a subschema; 0 for none."""
    if (key in MANY and isinstance(value, list)) or (key in MAPS and isinstance(value, dict)):
        return 2
    return 1 if key in ONE and isinstance(value, dict | bool) else 0


def _children(schema: dict[str, Any]) -> Iterator[Steps]:
    """The steps from a schema to each subschema."""
    for key, value in schema.items():
        match _width(key, value):
            case 1:
                yield (key,)
            case 2 if isinstance(value, list):
                yield from ((key, str(i)) for i in range(len(value)))
            case 2:
                yield from ((key, str(name)) for name in value)


def _nodes(schema: Any) -> Iterator[Steps]:
    """Every subschema, those above before those below."""
    pending: list[tuple[Steps, Any]] = [((), schema)]
    while pending:
        node, value = pending.pop()
        yield node
        if isinstance(value, dict):
            pending += [((*node, *steps), _at(value, steps)) for steps in _children(value)]


def _keywords(schema: Any) -> Iterator[str]:
    """The pointer of every keyword that restricts something."""
    for node in _nodes(schema):
        value = _at(schema, node)
        if isinstance(value, dict):
            yield from (join("", *node, key) for key in value if key in _LISTED)


def _above(pointer: str) -> Iterator[str]:
    while pointer := pointer.rpartition("/")[0]:
        yield pointer


def _steps(pointer: str) -> Steps:
    parts = pointer.removeprefix("#").split("/")[1:]
    return tuple(p.replace("~1", "/").replace("~0", "~") for p in parts)


def _at(value: Any, steps: Steps) -> Any:
    for step in steps:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value
