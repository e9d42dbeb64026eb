"""Where references of a schema lead: resources by `$id`, anchors, JSON pointers, base URIs.

Only what is inside the document is found; nothing is ever fetched.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from phloem.constrained.base import MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_node import Node, Schema, join

DEFAULT_BASE = "http://schema.invalid/schema"
"""The base of a document that has no absolute `$id`."""

_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")


class References:
    """Filled by `enter` with every subschema, parents first, then asked."""

    def __init__(self, root: Node, *, draft_4: bool, ref_alone: bool) -> None:
        self._keyword = "id" if draft_4 else "$id"
        self._ref_alone = ref_alone
        self._bases: dict[str, str] = {}
        self._resources: dict[str, Node] = {DEFAULT_BASE: root}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[str, list[Node]] = {}

    def enter(self, node: Node) -> None:
        """Take down what `node`, an object, says of itself."""
        schema = node.schema
        assert isinstance(schema, dict)
        base = self.base(node.pointer)
        named = schema.get(self._keyword)
        if isinstance(named, str) and not (self._ref_alone and "$ref" in schema):
            address, _, fragment = named.partition("#")
            if address:
                base = absolute(base, address)
                self._resources.setdefault(base, node)
            if fragment and not fragment.startswith("/"):
                self._anchors.setdefault((base, fragment), node)
        if base != self.base(node.pointer) or not node.pointer:
            self._bases[node.pointer] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), node)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(node)

    def base(self, pointer: str) -> str:
        """The base URI at a place: that of the nearest resource around it."""
        while pointer and pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases.get(pointer, DEFAULT_BASE)

    def resource(self, uri: str) -> Schema | None:
        """The resource of this URI, if it is in the document."""
        found = self._resources.get(uri.removesuffix("#"))
        return None if found is None else found.schema

    def locate(self, pointer: str) -> str:
        """A URI that leads to a place of the document."""
        base = self.base(pointer)
        inside = pointer.removeprefix(self._resources[base].pointer)
        return f"{base}#{urllib.parse.quote(inside, safe='/~')}"

    def resolve(self, ref: str, node: Node, key: str = "$ref") -> Node:
        """The target of a reference that stands in `node` under `key`.

        Raises:
            UnsupportedKeyword: the reference leaves the document.
            MalformedConstraint: there is nothing at its end.
        """
        path = node.at(key)
        address, _, fragment = ref.partition("#")
        base = self.base(node.pointer)
        base = absolute(base, address) if address else base
        resource = self._resources.get(base)
        if resource is None:
            raise UnsupportedKeyword(
                f"{key} to another document is not supported: references stay in the schema",
                path=path,
            )
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
            if found is None:
                raise MalformedConstraint(f"{key} to an $anchor that is not there", path=path)
            return found
        return _follow(resource, fragment, key, path)

    def resolve_dynamic(self, ref: str, node: Node) -> Node:
        """The target of a `$dynamicRef`, where it does not depend on the way that led there.

        Raises:
            As `resolve`; UnsupportedKeyword also for a target that depends on it.
        """
        target = self.resolve(ref, node, "$dynamicRef")
        fragment = ref.partition("#")[2]
        schema = target.schema
        if not isinstance(schema, dict) or schema.get("$dynamicAnchor") != fragment:
            return target
        # Every way there began at the root, so an anchor of the root's resource is outermost.
        outermost = [n for n in self._dynamic[fragment] if self.base(n.pointer) == self.base("")]
        if outermost:
            return outermost[0]
        if len(self._dynamic[fragment]) > 1:
            raise UnsupportedKeyword(
                "$dynamicRef to an anchor that several schemas have is not supported",
                path=node.at("$dynamicRef"),
            )
        return target


def absolute(base: str, address: str) -> str:
    """`address`, without a fragment, as a URI."""
    if _SCHEME.match(address):
        return address
    return urllib.parse.urljoin(base, address)


def _follow(resource: Node, fragment: str, key: str, path: str) -> Node:
    target: Any = resource.schema
    pointer = resource.pointer
    for part in fragment.split("/")[1:]:
        step = part.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise MalformedConstraint(
                f"{key} to a place that is not in the schema", path=path, code="dangling_ref"
            ) from None
        pointer = join(pointer, step)
    if not isinstance(target, dict | bool):
        raise MalformedConstraint(f"{key} to something that is not a schema", path=path)
    return Node(pointer, schema=target)
