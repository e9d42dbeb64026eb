"""The radix tree over the KV pool: `RadixTree`, the `Lease`s on it, the `SlotPool` beneath it; what
it tells routers, and the `TreeMirror` that listens."""

from phloem.radix.divergence import Divergence, MissReason
from phloem.radix.errors import IntegrityError, LeaseError, OutOfSlots, RadixError, SlotError
from phloem.radix.events import Cleared, KvEvent, NodeRemoved, NodeSplit, NodeStored
from phloem.radix.evict import (
    FIFO,
    LFU,
    LRU,
    POLICIES,
    PRIORITY,
    PROGRAM,
    SIZE,
    SLRU,
    EvictionPolicy,
    policy_by_name,
)
from phloem.radix.lease import Lease
from phloem.radix.mirror import TreeMirror
from phloem.radix.node import common_prefix
from phloem.radix.slots import SlotPool
from phloem.radix.stats import NodeView, RadixStats
from phloem.radix.survey import NamespaceSummary, NodeSummary
from phloem.radix.tree import RadixTree

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "PRIORITY",
    "PROGRAM",
    "SIZE",
    "SLRU",
    "Cleared",
    "Divergence",
    "EvictionPolicy",
    "IntegrityError",
    "KvEvent",
    "Lease",
    "LeaseError",
    "MissReason",
    "NamespaceSummary",
    "NodeRemoved",
    "NodeSplit",
    "NodeStored",
    "NodeSummary",
    "NodeView",
    "OutOfSlots",
    "RadixError",
    "RadixStats",
    "RadixTree",
    "SlotError",
    "SlotPool",
    "TreeMirror",
    "common_prefix",
    "policy_by_name",
]
