"""Answers to what can be asked of the cache and the scheduler (`phloem.srt.questions`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from phloem.radix import Divergence, common_prefix
from phloem.srt.errors import InvalidRequest, NotFound, PhloemError
from phloem.srt.messages import Answer, Flush, Question
from phloem.srt.questions import (
    AskExplain,
    AskPolicy,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    Elsewhere,
    MissReason,
    NamespaceUse,
    Pin,
    Pinned,
    Policy,
    Refused,
    TenantUse,
    TreeNode,
    Unpin,
    Unpinned,
)
from phloem.srt.scheduler.ledger import Ledger
from phloem.srt.scheduler.order import POLICIES
from phloem.srt.scheduler.past import Past
from phloem.srt.scheduler.queue import WaitingQueue
from phloem.srt.scheduler.request import Request
from phloem.srt.scheduler.tenants import Shares
from phloem.srt.wire import pack, unpack_array

SHOWN_NAMESPACES = 100
"""Namespaces listed in the statistics, and looked into for a prompt that missed."""


@dataclass(frozen=True)
class Answers:
    """Reads the scheduler's state, and changes only what a question asks to change: pins, order."""

    ledger: Ledger
    waiting: WaitingQueue
    shares: Shares
    eviction_policy: str
    clock: Callable[[], float]
    past: Past

    def answer(self, question: Question, requests: Mapping[str, Request]) -> Answer:
        """The one answer to `question`; `requests` are those alive, by id."""
        try:
            return self._answer(question, requests)
        except PhloemError as error:
            return Refused(question.id, error.to_info())

    def _answer(self, question: Question, requests: Mapping[str, Request]) -> Answer:
        match question:
            case AskStats():
                return self._stats(question)
            case AskTree():
                return self._tree(question)
            case AskExplain():
                return self._explain(question, requests)
            case Pin(id_, name, prompt, namespace, ttl_s):
                pins = self.ledger.pins
                held = pins.pin(name, unpack_array(prompt), namespace, ttl_s)
                return Pinned(id_, held, pins.tokens, pins.budget)
            case Unpin(id_, name):
                return Unpinned(id_, self.ledger.pins.unpin(name))
            case AskPolicy():
                return self._policy(question)
            case Flush():
                raise TypeError(
                    "flushes wait for the step in flight, so the scheduler answers them"
                )

    def _policy(self, question: AskPolicy) -> Policy:
        if question.policy is not None:
            if question.policy not in POLICIES:
                raise InvalidRequest(
                    f"there is no policy {question.policy!r}; there are {', '.join(POLICIES)}",
                    param="policy",
                )
            self.waiting.set_policy(question.policy)
        return Policy(question.id, self.waiting.policy, list(POLICIES))

    # ------------------------------------------------------------------ the cache

    def _stats(self, question: AskStats) -> CacheStats:
        ledger, tree = self.ledger, self.ledger.tree
        stats, tier = tree.stats(), ledger.tier.use()
        return CacheStats(
            id=question.id,
            capacity=ledger.pool.capacity,
            free=ledger.pool.free,
            evictable=tree.evictable,
            locked=tree.locked,
            private=ledger.private,
            loading=ledger.tier.loading_slots,
            pinned=ledger.pins.tokens,
            pin_budget=ledger.pins.budget,
            page_size=ledger.page_size,
            nodes=tree.nodes,
            eviction_policy=self.eviction_policy,
            schedule_policy=self.waiting.policy,
            lookups_total=stats.lookups_total,
            lookup_tokens_total=stats.lookup_tokens_total,
            hit_tokens_total=stats.hit_tokens_total,
            inserted_tokens_total=stats.inserted_total,
            duplicate_tokens_total=stats.duplicate_total,
            evicted_tokens_total=stats.evicted_total,
            namespaces_total=stats.namespaces,
            namespaces=[
                NamespaceUse(found.namespace, found.tokens, found.nodes)
                for found in tree.namespaces(SHOWN_NAMESPACES)
            ],
            tenants=[self._tenant(tenant) for tenant in self.shares.tenants],
            programs=stats.programs,
            pins=ledger.pins.uses(),
            tiers=[tier] if tier is not None else [],
        )

    def _tenant(self, tenant: str) -> TenantUse:
        return TenantUse(
            tenant=tenant,
            weight=self.shares.weight(tenant),
            running=self.shares.running(tenant),
            waiting=self.shares.waiting(tenant),
            slots=self.ledger.held_by(tenant),
            quota=self.shares.quota(tenant),
            served=self.shares.served(tenant),
        )

    def _tree(self, question: AskTree) -> CacheTree:
        now = self.clock()
        nodes, truncated = self.ledger.tree.survey(
            question.namespace,
            unpack_array(question.prefix),
            min_tokens=question.min_tokens,
            limit=question.limit,
            preview=question.preview,
        )
        return CacheTree(
            question.id,
            [
                TreeNode(
                    node=node.node,
                    parent=node.parent,
                    namespace=node.namespace,
                    start=node.start,
                    tokens=node.tokens,
                    total=node.total,
                    leases=node.leases,
                    hits=node.hits,
                    idle_s=now - node.last_access,
                    children=node.children,
                    preview=pack(node.preview),
                )
                for node in nodes
            ],
            truncated,
        )

    # ------------------------------------------------------------------ hits and misses

    def admitted(self, request: Request) -> None:
        """Remember what the tree has of a request that begins to run, before it changes that."""
        divergence = self.ledger.tree.explain(
            request.tokens, request.namespace, request.match_limit
        )
        self.past.add(request, divergence, self.clock())

    def _explain(self, question: AskExplain, requests: Mapping[str, Request]) -> CacheExplanation:
        if question.rid is None:
            prompt = unpack_array(question.prompt)
            if not prompt:
                raise InvalidRequest("the prompt is empty", param="prompt")
            return self._explain_now(question, prompt, question.namespace)
        past = self.past.get(question.rid)
        if past is not None:
            return self._explained(
                question.id, past.prompt, past.namespace, past.divergence, question.rid, past.at
            )
        request = requests.get(question.rid)
        if request is None:
            raise NotFound(
                f"nothing is remembered of a request {question.rid!r}",
                param="rid",
                code="request_not_found",
            )
        prompt = request.tokens[: request.prompt_len]
        return self._explain_now(question, prompt, request.namespace)

    def _explain_now(
        self, question: AskExplain, prompt: array[int], namespace: str
    ) -> CacheExplanation:
        divergence = self.ledger.tree.explain(prompt, namespace)
        reply = self._explained(question.id, prompt, namespace, divergence, question.rid, None)
        reason = reply.reason
        if reason is not MissReason.WHOLE and self._computing(prompt, namespace, reply.matched):
            reason = MissReason.COMPUTING
        elsewhere: list[Elsewhere] = []
        if not reply.matched and question.elsewhere:
            elsewhere = self._elsewhere(prompt, namespace)
            if elsewhere and reason is MissReason.NEVER_SEEN:
                reason = MissReason.NAMESPACE
        return replace(
            reply,
            reason=reason,
            elsewhere=elsewhere,
            restorable=self.ledger.tier.peek(prompt, namespace, reply.matched),
        )

    def _explained(
        self,
        id_: int,
        prompt: array[int],
        namespace: str,
        divergence: Divergence,
        rid: str | None,
        at: float | None,
    ) -> CacheExplanation:
        then = self.clock() if at is None else at
        gone = divergence.evicted_at
        return CacheExplanation(
            id=id_,
            prompt=pack(prompt),
            namespace=namespace,
            matched=divergence.matched,
            reason=MissReason(divergence.reason.value),
            branches=divergence.branches,
            cached=[pack(tokens) for tokens in divergence.cached],
            evicted_tokens=divergence.evicted_tokens,
            evicted_s=None if gone is None else then - gone,
            evicted_by=divergence.evicted_by,
            rid=rid,
            at_admission=at is not None,
        )

    def _computing(self, prompt: array[int], namespace: str, matched: int) -> bool:
        """Whether a running prefill is about to add to what the tree has of `prompt`."""
        limit = len(prompt) - 1
        return any(
            common_prefix(prompt, other.tokens, limit) > matched
            for other in self.ledger.running.values()
            if other.is_prefilling and not other.private and other.namespace == namespace
        )

    def _elsewhere(self, prompt: array[int], namespace: str) -> list[Elsewhere]:
        tree = self.ledger.tree
        found = [
            Elsewhere(other.namespace, matched)
            for other in tree.namespaces(SHOWN_NAMESPACES)
            if other.namespace != namespace and (matched := tree.match(prompt, other.namespace))
        ]
        return sorted(found, key=lambda other: -other.matched)[:5]
