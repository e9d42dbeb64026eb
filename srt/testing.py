"""Fakes to test a scheduler, or code on top of one, without a model: shipped, typed, documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from phloem.srt.messages import (
    Draft,
    Pooling,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerReady,
)
from phloem.srt.tier.chain import KEY_BYTES
from phloem.srt.tier_messages import (
    FromTier,
    KvDropped,
    KvLoad,
    KvLoaded,
    KvSave,
    KvSaved,
    StopTier,
    TierReady,
    ToTier,
)
from phloem.srt.wire import unpack

_MASK = (1 << 61) - 1


def chain(state: int, token: int) -> int:
    """Hash of a token sequence, one token further: what stands for KV in the fake worker."""
    return (state * 1_000_003 + token + 1) * 0x9E3779B97F4A7C15 & _MASK


class ManualClock:
    """A clock that goes when told. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ProtocolViolation(AssertionError):
    """The scheduler planned something that would make a real worker read wrong KV."""


@dataclass
class _Row:
    epoch: int
    prompt_len: int
    slots: list[int]
    last_token: int | None = None
    prompt_logprobs_from: int | None = None
    stop_ids: frozenset[int] = frozenset()
    embed: Pooling | None = None
    pooled: int = 0


@dataclass
class FakeWorker:
    """A worker whose KV is checkable: each slot holds the hash of the whole prefix it stands for.

    A plan that lets a row read a slot with another prefix raises `ProtocolViolation`: a slot that
    was freed too early, shared wrongly or never computed cannot go unnoticed. The sampled token is
    a function of the row's tokens alone (`next_token`), so an answer must not depend on caching,
    batching, chunking or preemption. So is the embedding (`embedding_of`).
    """

    kv_slots: int
    max_rows: int
    vocab_size: int = 64
    context_length: int = 1 << 20
    eos_ids: Sequence[int] = (0,)
    sample: Callable[[int], int] | None = None
    """Prefix hash → token; by default spread evenly over the vocabulary."""
    computed: int = 0
    """Tokens computed so far."""
    steps: int = 0
    kv: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Slot → position of its token, hash of the prefix before it, and with it."""
    _rows: dict[int, _Row] = field(default_factory=dict)

    def ready(self) -> WorkerReady:
        return WorkerReady(
            kv_slots=self.kv_slots,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            eos_ids=list(self.eos_ids),
            startup={},
        )

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows `tokens`, computed from scratch."""
        state = 0
        for token in tokens:
            state = chain(state, token)
        return self._draw(state)

    def embedding_of(self, tokens: Sequence[int], pooling: Pooling) -> bytes:
        """The embedding of `tokens`: of a mean every token's prefix has its part."""
        state = pooled = 0
        for token in tokens:
            state = chain(state, token)
            pooled = pooled * 31 + state & _MASK
        return (pooled if pooling is Pooling.MEAN else state).to_bytes(8, "little")

    def _draw(self, state: int) -> int:
        return self.sample(state) if self.sample is not None else (state >> 23) % self.vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        """Execute a step, checking every slot it reads and writes."""
        self.steps += 1
        written: set[int] = set()
        results = [self._run_row(row, written) for row in plan.rows]
        return StepResult(plan.step_id, results, forward_seconds=0.001)

    def _run_row(self, plan: RowPlan, written: set[int]) -> RowResult:
        row = self._row_of(plan)
        tokens, slots = unpack(plan.tokens), unpack(plan.slots)
        drafted, slots = slots[len(slots) - plan.drafted :], slots[: len(slots) - plan.drafted]
        if not tokens:
            if row.last_token is None or len(slots) != 1:
                raise ProtocolViolation(f"row {plan.row} has no last sampled token")
            tokens = [row.last_token]
        if len(tokens) != len(slots):
            raise ProtocolViolation(f"{len(tokens)} tokens but {len(slots)} slots")
        state = self._read_prefix(row)
        prompt_logprobs = []
        for token, slot in zip(tokens, slots, strict=True):
            position = len(row.slots)
            since = row.prompt_logprobs_from
            if since is not None and max(since, 1) <= position < row.prompt_len:
                prompt_logprobs.append(TokenLogprob(token, -float(position)))
            self._write(row, token, slot, state, written)
            state = chain(state, token)
            row.pooled = row.pooled * 31 + state & _MASK
        if not plan.sample:
            embedding = self._embedding(row, state)
            return RowResult(
                plan.epoch, prompt_logprobs=prompt_logprobs or None, embedding=embedding
            )
        accepted, token = 0, self._draw(state)
        if plan.draft is not None:
            accepted, token = self._follow(row, plan.draft, drafted, state, written)
        row.last_token = token
        return RowResult(
            plan.epoch, token, prompt_logprobs=prompt_logprobs or None, accepted=accepted
        )

    def _follow(
        self, row: _Row, draft: Draft, slots: list[int], state: int, written: set[int]
    ) -> tuple[int, int]:
        """Draw along a draft, as `phloem.srt.worker.drafts` does: how much of it was accepted, and
        the token behind that, or -1."""
        states = [state]
        for token, slot in zip(draft.tokens, slots, strict=False):
            self._write(row, token, slot, states[-1], written)
            states.append(chain(states[-1], token))
        length = len(row.slots) - len(slots)
        accepted = 0
        for at, end in zip(draft.draws, [*draft.draws[1:], len(draft.tokens)], strict=True):
            token = self._draw(states[at])
            if at == end or token != draft.tokens[at]:
                break
            accepted = end
        else:
            token = -1
        del row.slots[length + accepted :]
        return accepted, token

    def _write(self, row: _Row, token: int, slot: int, state: int, written: set[int]) -> None:
        """Compute `token` behind a prefix of hash `state` into `slot`."""
        if not 0 < slot < self.kv_slots or slot in written:
            raise ProtocolViolation(f"slot {slot} written twice or out of the pool")
        written.add(slot)
        self.kv[slot] = (len(row.slots), state, chain(state, token))
        row.slots.append(slot)
        self.computed += 1

    @staticmethod
    def _embedding(row: _Row, state: int) -> bytes | None:
        if row.embed is None or len(row.slots) < row.prompt_len:
            return None
        return (row.pooled if row.embed is Pooling.MEAN else state).to_bytes(8, "little")

    def _row_of(self, plan: RowPlan) -> _Row:
        if plan.start is not None:
            if not 0 <= plan.row < self.max_rows:
                raise ProtocolViolation(f"row {plan.row} of {self.max_rows}")
            start = plan.start
            self._rows[plan.row] = _Row(
                plan.epoch,
                start.prompt_len,
                unpack(start.prefix_slots),
                prompt_logprobs_from=start.prompt_logprobs_from,
                stop_ids=frozenset(start.stop_ids),
                embed=start.embed,
            )
            if start.embed is Pooling.MEAN and start.prefix_slots:
                raise ProtocolViolation("a mean over tokens that are not computed")
        row = self._rows.get(plan.row)
        if row is None or row.epoch != plan.epoch:
            raise ProtocolViolation(f"row {plan.row} was not started for epoch {plan.epoch}")
        return row

    def _read_prefix(self, row: _Row) -> int:
        """Check that the row's slots hold one unbroken prefix; its hash."""
        state = 0
        for position, slot in enumerate(row.slots):
            held = self.kv.get(slot)
            if held is None or held[:2] != (position, state):
                raise ProtocolViolation(f"slot {slot} does not hold this row's token {position}")
            state = held[2]
        return state


@dataclass
class FakeTier:
    """A lower tier in memory, for the KV of a `FakeWorker`: what it gives back can be checked as
    well. Holds `limit` blocks, the oldest goes first."""

    worker: FakeWorker
    block_tokens: int
    limit: int = 1 << 30
    damaged: set[bytes] = field(default_factory=set)
    """Blocks that will be found damaged when they are read."""
    broken: bool = False
    """Whether every write fails."""
    _blocks: dict[bytes, list[tuple[int, int, int]]] = field(default_factory=dict)

    def ready(self) -> TierReady:
        keys = list(self._blocks)
        return TierReady(self.block_tokens, 1, self.limit, KEY_BYTES, b"".join(keys))

    def run(self, order: ToTier) -> list[FromTier]:
        """Carry out one order; what the tier says to it."""
        match order:
            case KvSave():
                return self._save(order)
            case KvLoad():
                return [self._load(order)]
            case StopTier():
                return []

    def _save(self, order: KvSave) -> list[FromTier]:
        if self.broken:
            return [KvSaved(order.order, 0, "no space is left")]
        for key, slots in self._pairs(order.keys, order.slots):
            self._blocks[key] = [self.worker.kv[slot] for slot in slots]
        dropped = list(self._blocks)[: max(0, len(self._blocks) - self.limit)]
        for key in dropped:
            del self._blocks[key]
        said: list[FromTier] = [KvSaved(order.order, len(order.keys))]
        return [*said, KvDropped(dropped)] if dropped else said

    def _load(self, order: KvLoad) -> KvLoaded:
        good = 0
        for key, slots in self._pairs(order.keys, order.slots):
            block = self._blocks.get(key)
            if key in self.damaged or block is None:
                self._blocks.pop(key, None)
                return KvLoaded(order.order, good, [key])
            self.worker.kv.update(zip(slots, block, strict=True))
            good += 1
        return KvLoaded(order.order, good)

    def _pairs(self, keys: Sequence[bytes], packed: bytes) -> Iterator[tuple[bytes, list[int]]]:
        slots, size = unpack(packed), self.block_tokens
        if len(slots) != len(keys) * size:
            raise ProtocolViolation(f"{len(slots)} slots for {len(keys)} blocks of {size}")
        for i, key in enumerate(keys):
            yield key, slots[i * size : (i + 1) * size]
