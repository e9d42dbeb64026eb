"""Changes of the radix tree on the wire: who applies them in order has its mirror
(`phloem.radix.TreeMirror`)."""

from __future__ import annotations

from phloem.radix import KvEvent
from phloem.srt.wire import Wire


class KvEvents(Wire, frozen=True, tag="kv_events"):
    """Changes of the tree, in order. `sequence` counts messages without a gap."""

    sequence: int
    events: list[KvEvent]
