"""What the scheduler can be asked about its cache and its order, and what it answers.

A question has an id and gets exactly one answer with that id. Token ids travel packed. Parts of an
answer that HTTP replies have as they are (`…Use`, `Elsewhere`) are objects with named fields.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phloem.srt.errors import ErrorInfo
from phloem.srt.wire import Wire

# --------------------------------------------------------------------------- questions


class AskStats(Wire, frozen=True, tag="ask_stats"):
    """What is in the cache; answered with `CacheStats`."""

    id: int


class AskTree(Wire, frozen=True, tag="ask_tree"):
    """Nodes of the radix tree, parents before children; answered with `CacheTree`.

    Only those of `namespace` (None: of all) at or below the end of `prefix` (packed), with at
    least `min_tokens` tokens in their edge and below them together; at most `limit`. `preview`
    token ids of each edge are sent along.
    """

    id: int
    namespace: str | None = None
    prefix: bytes = b""
    min_tokens: int = 0
    limit: int = 100
    preview: int = 0


class AskExplain(Wire, frozen=True, tag="ask_explain"):
    """Why a prompt would hit or miss now, or why a past request did (`rid`, with its own prompt
    and namespace); answered with `CacheExplanation`, or `Refused` for an id that is not known (any
    more)."""

    id: int
    prompt: bytes = b""
    namespace: str = ""
    rid: str | None = None
    elsewhere: bool = True  # whether to look into other namespaces, which takes time


class Pin(Wire, frozen=True, tag="pin"):
    """Keep what the tree has of `prompt` (packed) from eviction, for `ttl_s` seconds (None: until
    `Unpin`). Answered with `Pinned`, or `Refused` when nothing is cached or the budget is spent."""

    id: int
    name: str
    prompt: bytes
    namespace: str = ""
    ttl_s: float | None = None


class Unpin(Wire, frozen=True, tag="unpin"):
    """End the pin called `name`. Answered with `Unpinned`, or `Refused` when there is none."""

    id: int
    name: str


class AskPolicy(Wire, frozen=True, tag="ask_policy"):
    """Order waiting requests by `policy` from now on, if one is named. Answered with `Policy`, or
    `Refused` when there is none of that name."""

    id: int
    policy: str | None = None


# --------------------------------------------------------------------------- answers


class Refused(Wire, frozen=True, tag="refused"):
    """Question `id` cannot be answered; nothing was changed."""

    id: int
    error: ErrorInfo


class NamespaceUse(msgspec.Struct, frozen=True, gc=False):
    """One namespace's share of the tree. `tokens` counts locked ones in."""

    namespace: str
    tokens: int
    nodes: int


class TenantUse(msgspec.Struct, frozen=True, gc=False):
    """One tenant's place. `slots` are those its running requests hold, shared ones counted for
    each; `served` are weighted tokens, what fair shares compare."""

    tenant: str
    weight: float
    running: int
    waiting: int
    slots: int
    quota: int | None
    served: float


class PinUse(msgspec.Struct, frozen=True, gc=False):
    """`expires_s` from now, None for never."""

    name: str
    namespace: str
    tokens: int
    expires_s: float | None


class TierUse(msgspec.Struct, frozen=True, gc=False):
    """A tier below the pool. Blocks hold `block_tokens` tokens each."""

    tier: str
    block_tokens: int
    blocks: int
    bytes: int
    limit_bytes: int
    saved_tokens_total: int
    loaded_tokens_total: int
    dropped_tokens_total: int
    corrupt_blocks_total: int


class CacheStats(Wire, frozen=True, tag="cache_stats"):
    """The pool (`free + evictable + locked + private = capacity`, in slots) and what it holds.
    `loading` slots, of `private`, wait for a lower tier. Namespaces: the largest ones."""

    id: int
    capacity: int
    free: int
    evictable: int
    locked: int
    private: int
    loading: int
    pinned: int
    pin_budget: int
    page_size: int
    nodes: int
    eviction_policy: str
    schedule_policy: str
    lookups_total: int
    lookup_tokens_total: int
    hit_tokens_total: int
    inserted_tokens_total: int
    duplicate_tokens_total: int
    evicted_tokens_total: int
    namespaces_total: int
    namespaces: list[NamespaceUse]
    tenants: list[TenantUse]
    programs: int
    pins: list[PinUse]
    tiers: list[TierUse]


class TreeNode(Wire, frozen=True):
    """A node: `tokens` of its edge after `start` tokens before it; `parent` is a node's id, 0 for
    the root of `namespace`. `leases` end here or below. `total` counts the edge and all below it.
    `preview` (packed) are the edge's first token ids."""

    node: int
    parent: int
    namespace: str
    start: int
    tokens: int
    total: int
    leases: int
    hits: int
    idle_s: float
    children: int
    preview: bytes = b""


class CacheTree(Wire, frozen=True, tag="cache_tree"):
    """`truncated` when there are more nodes than were asked for."""

    id: int
    nodes: list[TreeNode]
    truncated: bool


class MissReason(StrEnum):
    """Why the tree has no more of a prompt than it has."""

    WHOLE = "whole"  # it has all that it may give: the last token is always computed
    NEVER_SEEN = "never_seen"  # nothing was ever cached there, as far as is remembered
    OTHER_TOKEN = "other_token"  # something else follows there
    EVICTED = "evicted"  # it was there, and went for another request's slots
    FLUSHED = "flushed"  # it was there until somebody flushed the cache
    COMPUTING = "computing"  # a running request is about to compute it
    NAMESPACE = "namespace"  # nothing in its own namespace, but there is in another
    LIMITED = "limited"  # there is more, but the request asked for logits of these tokens


class Elsewhere(msgspec.Struct, frozen=True, gc=False):
    """What another namespace has of the same prompt."""

    namespace: str
    matched: int


class CacheExplanation(Wire, frozen=True, tag="explanation"):
    """`matched` of `prompt_tokens` come from the tree; then `reason`.

    `prompt` (packed) is what was asked about. `cached` (packed) are up to some tokens that follow
    in the tree instead, the most used branch first; `branches` is how many. For what was evicted:
    how many tokens, how long ago, and for which request. `restorable` tokens after `matched` are
    in a lower tier. `at_admission` is set when a past request is explained as it was then.
    """

    id: int
    prompt: bytes
    namespace: str
    matched: int
    reason: MissReason
    branches: int = 0
    cached: list[bytes] = []
    evicted_tokens: int = 0
    evicted_s: float | None = None
    evicted_by: str = ""
    restorable: int = 0
    elsewhere: list[Elsewhere] = []
    rid: str | None = None
    at_admission: bool = False


class Pinned(Wire, frozen=True, tag="pinned"):
    id: int
    tokens: int  # of the prompt, from its first on
    pinned: int  # of all pins together
    budget: int


class Unpinned(Wire, frozen=True, tag="unpinned"):
    id: int
    tokens: int


class Policy(Wire, frozen=True, tag="policy"):
    id: int
    policy: str
    policies: list[str]
