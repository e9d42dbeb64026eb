"""Changes of the radix tree, as a router reads them: who applies them in order has its mirror."""

from __future__ import annotations

from phloem.srt.wire import Wire


class NodeStored(Wire, frozen=True, tag="stored"):
    """`tokens` (packed) are in the tree, at the end of node `parent` (0: the root of `namespace`).
    A `node` that is known already has grown by them."""

    node: int
    parent: int
    namespace: str
    tokens: bytes


class NodeSplit(Wire, frozen=True, tag="split"):
    """`node`'s first `at` tokens are now `upper`, its parent."""

    node: int
    upper: int
    at: int


class NodeRemoved(Wire, frozen=True, tag="removed"):
    """`node` has only its first `keep` tokens left; with 0 it is gone."""

    node: int
    keep: int


class Cleared(Wire, frozen=True, tag="cleared"):
    """Everything known so far is void: what follows is the whole tree."""


KvEvent = NodeStored | NodeSplit | NodeRemoved | Cleared


class KvEvents(Wire, frozen=True, tag="kv_events"):
    """Changes of the tree, in order. `sequence` counts messages without a gap."""

    sequence: int
    events: list[KvEvent]
