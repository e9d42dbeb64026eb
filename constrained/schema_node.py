"""A schema at a place of its document."""

from __future__ import annotations

import dataclasses
from typing import Any

Schema = dict[str, Any] | bool

# Keywords below which a schema has subschemas: one, a list of them, or a map of them.
ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A schema at a place of the document, or (`negated`) what that schema refuses.

    Equal by place: `pointer` is the JSON pointer as a URI fragment body.
    """

    pointer: str
    negated: bool = False
    schema: Schema = dataclasses.field(default=True, compare=False, repr=False)

    def child(self, *keys: str | int) -> Node:
        """The subschema below these keys."""
        schema: Any = self.schema
        for key in keys:
            schema = schema[key]
        return Node(join(self.pointer, *keys), schema=schema)

    def complement(self) -> Node:
        return dataclasses.replace(self, negated=not self.negated)

    def at(self, *keys: str | int) -> str:
        """The pointer below this place, for error messages."""
        return join(self.pointer, *keys)


def join(pointer: str, *keys: str | int) -> str:
    """`pointer` extended by these keys, escaped as RFC 6901 says."""
    return pointer + "".join("/" + str(k).replace("~", "~0").replace("/", "~1") for k in keys)
