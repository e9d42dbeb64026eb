"""One request inside the scheduler: a token sequence, and how much of it has KV.

There is no prefill state and no decode state. `computed_len` chases `len(tokens)`: a fresh prompt,
a chunk in the middle, a decode step and a resume after preemption differ only in the distance.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from phloem.constrained.spec import Constraint
from phloem.radix import Lease
from phloem.srt.messages import CallPlan, Draft, JumpForward, Pooling, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from phloem.srt.scheduler.programs import Member


class Status(Enum):
    COMPILING = "compiling"  # its grammar is not ready
    WAITING = "waiting"  # in the queue, for the first time or after preemption
    RUNNING = "running"  # has a row in the worker
    FINISHED = "finished"


_ALLOWED: dict[Status, tuple[Status, ...]] = {
    Status.COMPILING: (Status.WAITING, Status.FINISHED),
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """State of one request. Owned by the scheduler; only `Ledger` touches KV fields.

    `tokens` is the prompt followed by the output. KV exists for tokens [0, computed_len): those in
    [0, lease.length) lie in the tree, the rest in `tail_slots`, one slot a token, this request's
    alone until it ends; `spare_slots` are what is left of its last page. `private` requests keep
    all they compute in the tail: the tree already holds (some of) the same tokens under other
    slots, which stay evictable, or they stay `apart` from it.
    """

    uid: int
    rid: str
    tokens: array[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    max_output: int
    stop_ids: frozenset[int]
    arrival: float
    deadline: float
    namespace: str = ""
    priority: int = 0
    tenant: str = ""
    program: str = ""
    plan: CallPlan | None = None
    constraint: Constraint | None = None
    grammar_key: str | None = None
    jump: JumpForward = JumpForward.OFF
    prompt_logprobs_from: int | None = None
    embed: Pooling | None = None

    member: Member | None = None
    """Its program, as `programs.py` knows it."""
    status: Status = Status.WAITING
    aborted: bool = False
    expired: bool = False
    epoch: int = 0
    row: int = -1
    row_sampled: bool = False
    """The row drew the last token itself, so the worker has it."""
    decoding: bool = False
    """The row has drawn a token: what it lacks now are tokens just drawn or forced."""
    lease: Lease | None = None
    tail_slots: list[int] = field(default_factory=list)
    spare_slots: list[int] = field(default_factory=list)
    private: bool = False
    computed_len: int = 0
    block_keys: list[bytes] | None = None
    """Keys of the prompt's blocks in lower tiers, once they were asked for."""
    restoring: bool = False
    restores: int = 0
    """Times that blocks were fetched for it."""

    cached_tokens: int | None = None
    preemptions: int = 0
    started: float | None = None
    grammar_tokens: int = 0
    """Output tokens that the grammar process was told of."""
    forced_tokens: int = 0
    """Output tokens that the constraint forced."""
    draft: Draft | None = None
    """What may follow the last token; in a step, what is drawn along in it."""
    draft_row: int = 0
    """Where its masks are, in the mask buffer."""
    draft_slots: list[int] = field(default_factory=list)
    """Slots that a step computes the draft into."""
    accepted_guesses: int = 0
    """Guesses of drafts that were what was drawn, and"""
    rejected_guesses: int = 0
    """those that were not, or came behind one that was not."""
    closed_by_budget: bool = False
    """Whether a choice was narrowed so that the constrained text is complete in time."""
    unsent: list[int] = field(default_factory=list)
    """Output tokens that the frontend was not told of yet."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    embedding: bytes | None = None
    announced: bool = False
    """Whether the first `Tokens` (with the prompt's logprobs) went out."""

    def __post_init__(self) -> None:
        self.private = self.private or self.apart

    def move_to(self, status: Status) -> None:
        """Change status along an allowed edge; anything else is a bug and raises."""
        if status not in _ALLOWED[self.status]:
            raise RuntimeError(f"request {self.rid}: {self.status.value} → {status.value}")
        self.status = status

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that have no KV yet."""
        return len(self.tokens) - self.computed_len

    @property
    def is_prefilling(self) -> bool:
        """The row has drawn no token yet, and more than the last one is missing."""
        if self.decoding:
            return False
        return self.computed_len < max(self.prompt_len, len(self.tokens) - 1)

    @property
    def apart(self) -> bool:
        """It takes nothing from the tree and leaves nothing there: a mean needs the hidden states
        of all tokens, which are not cached, and texts that are embedded are seldom gone on with."""
        return self.embed is Pooling.MEAN

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the tree: the last one is always computed, and so are those
        whose logits the prompt's logprobs are read from."""
        if self.apart:
            return 0
        limit = len(self.tokens) - 1
        if self.prompt_logprobs_from is not None and not self.announced:
            limit = min(limit, max(0, self.prompt_logprobs_from - 1))
        return limit
