"""The radix tree over the KV pool: `RadixTree`, the `Lease`s on it, the `SlotPool` beneath it."""

from phloem.radix.errors import IntegrityError, LeaseError, OutOfSlots, RadixError, SlotError
from phloem.radix.evict import FIFO, LFU, LRU, POLICIES, EvictionPolicy, policy_by_name
from phloem.radix.lease import Lease
from phloem.radix.node import common_prefix
from phloem.radix.slots import SlotPool
from phloem.radix.stats import NodeView, RadixStats
from phloem.radix.tree import RadixTree

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "EvictionPolicy",
    "IntegrityError",
    "Lease",
    "LeaseError",
    "NodeView",
    "OutOfSlots",
    "RadixError",
    "RadixStats",
    "RadixTree",
    "SlotError",
    "SlotPool",
    "common_prefix",
    "policy_by_name",
]
