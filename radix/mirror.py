"""A copy of the tree's keys that follows its events; what a router asks instead of the server."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from phloem.radix.events import Cleared, KvEvent, NodeRemoved, NodeSplit, NodeStored, unpack
from phloem.radix.node import Node, Root, as_tokens, descend_for, first_page


class TreeMirror:
    """What the tree that sends the events holds, without slots. `page_size` must be the tree's."""

    def __init__(self, page_size: int = 1) -> None:
        self._page = page_size
        self._descend = descend_for(page_size)
        self._roots: dict[str, Root] = {}
        self._nodes: dict[int, Node] = {}

    @property
    def nodes(self) -> int:
        """Nodes in all namespaces, roots not counted."""
        return len(self._nodes)

    @property
    def namespaces(self) -> list[str]:
        """Namespaces that have tokens."""
        return list(self._roots)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Make these changes, in order. Raises `ValueError` at one that does not fit what is known:
        then events were lost, and only a `Cleared` makes the mirror right again."""
        for event in events:
            match event:
                case NodeStored():
                    self._store(event)
                case NodeSplit():
                    self._split(event)
                case NodeRemoved():
                    self._remove(event)
                case Cleared():
                    self._roots.clear()
                    self._nodes.clear()

    def match(self, tokens: Sequence[int], namespace: str = "") -> int:
        """As `RadixTree.match`: the longest cached prefix, at most `len(tokens) - 1`."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        query = as_tokens(tokens)
        return self._descend(root, query, 0, len(query) - 1)[2]

    def _known(self, number: int, event: KvEvent) -> Node:
        node = self._nodes.get(number)
        if node is None:
            raise ValueError(f"events were lost: node {number} of {event} is not known")
        return node

    def _store(self, event: NodeStored) -> None:
        tokens = unpack(event.tokens)
        node = self._nodes.get(event.node)
        if node is not None:
            node.tokens.extend(tokens)
            return
        parent: Node
        if event.parent:
            parent = self._known(event.parent, event)
        elif event.namespace in self._roots:
            parent = self._roots[event.namespace]
        else:
            parent = self._roots[event.namespace] = Root(event.namespace, 0)
        node = Node(parent, tokens, array("i"), 0, event.node)
        parent.children[first_page(tokens, self._page)] = node
        self._nodes[event.node] = node

    def _split(self, event: NodeSplit) -> None:
        node = self._known(event.node, event)
        if not 0 < event.at < len(node.tokens):
            raise ValueError(f"events were lost: {event} of a node of {len(node.tokens)} tokens")
        self._nodes[event.upper] = node.split(event.at, self._page, event.upper)

    def _remove(self, event: NodeRemoved) -> None:
        node = self._known(event.node, event)
        if event.keep:
            del node.tokens[event.keep :]
            return
        parent = node.parent
        assert parent is not None, "a node has a parent"
        del self._nodes[event.node]
        del parent.children[first_page(node.tokens, self._page)]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]
