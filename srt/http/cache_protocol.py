"""What the `/cache` routes read and write. Unknown fields are errors.

Replies that have a counterpart in `phloem.srt.questions` take its fields by name; what they mean
stands there.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw

from phloem.srt.http.body import ABSENT
from phloem.srt.http.protocol import Message, RequestId, Seconds, ToolSpec
from phloem.srt.questions import Elsewhere, NamespaceUse, PinUse, TenantUse, TierUse

MAX_NODES: Final = 1000

TokenIds = Annotated[list[int], Meta(min_length=1)]

# --------------------------------------------------------------------------- requests


class SpaceFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which namespace: as a generation with these fields has it. `tenant` is for admins."""

    cache_salt: str | None = None
    extra_key: str | None = None
    tenant: str | None = None


class PromptFields(SpaceFields, kw_only=True, forbid_unknown_fields=True):
    """One prompt: text or ids as in completions, or a chat with all that its template sees."""

    model: str | None = None
    prompt: str | TokenIds | None = None
    input_ids: TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[ToolSpec], Meta(min_length=1)] | None = None
    tool_choice: Raw = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


class ExplainRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """A prompt, or the id of a request that was served."""

    rid: RequestId | None = None


class PinRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    name: RequestId | None = None
    ttl_s: Seconds | None = None
    compute: bool = True


class WarmRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """Several prompts of text or ids, or one prompt."""

    prompts: Annotated[list[str | TokenIds], Meta(min_length=1)] | None = None


class FlushRequest(SpaceFields, kw_only=True, forbid_unknown_fields=True):
    """A namespace by its name, or by the fields that make it; nothing at all is all of them."""

    namespace: str | None = None


class TreeQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    namespace: str | None = None
    prompt: str | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 100
    text: bool = False


class TenantQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tenant: str | None = None


# --------------------------------------------------------------------------- replies


class StatsReply(msgspec.Struct, frozen=True, kw_only=True):
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


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text` is how the edge begins."""

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
    text: str | None = None


class TreeReply(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[Node]
    truncated: bool


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """The text where the match ends: the last that is cached, how the prompt goes on, and how what
    is cached does, the most used branch first."""

    matched: str
    prompt: str
    cached: list[str]


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds_ago` and for which request; None where that is not known, or not to be told."""

    tokens: int
    seconds_ago: float | None
    rid: str | None
    tenant: str | None


class ExplainReply(msgspec.Struct, frozen=True, kw_only=True):
    rid: str | None
    namespace: str
    prompt_tokens: int
    matched_tokens: int
    reason: str
    summary: str
    around: Around
    branches: int
    evicted: Eviction | None
    restorable_tokens: int
    elsewhere: list[Elsewhere]
    at_admission: bool


class PinReply(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` of the prompt's `prompt_tokens` are pinned; `pinned` of `budget` are in use."""

    name: str
    prompt_tokens: int
    tokens: int
    ttl_s: float | None
    pinned: int
    budget: int


class UnpinReply(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tokens: int


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int


class WarmReply(msgspec.Struct, frozen=True, kw_only=True):
    prompts: list[Warmed]


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    node: int
    parent: int
    namespace: str
    tokens: list[int]


class SplitEvent(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    node: int
    upper: int
    at: int


class RemovedEvent(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    node: int
    keep: int


class ClearedEvent(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
