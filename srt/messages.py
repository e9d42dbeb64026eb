"""Every message that crosses a process boundary, one tagged union a channel.

    frontend ──ToScheduler──▶ scheduler ──ToWorker───▶ worker
    frontend ◀─ToFrontend──── scheduler ◀─FromWorker── worker
                              scheduler ──ToGrammar──▶ grammar ──StepMasks──▶ worker
                              scheduler ◀─FromGrammar─ grammar
                              scheduler ◀─▶ tier (`tier_messages.py`)

All are msgspec structs, encoded as MessagePack arrays; token ids and KV slots travel as packed
little-endian int32 (`wire.pack`, `wire.unpack`), since a prompt of thousands of ids is one copy
that way. Nobody pickles anything. Decoding an unknown or malformed message raises
`msgspec.DecodeError`, which the receiver counts and drops: a bad message is its sender's error.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phloem.constrained.spec import Constraint
from phloem.srt.errors import ErrorInfo
from phloem.srt.kv_events import KvEvents
from phloem.srt.questions import (
    AskExplain,
    AskPolicy,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    Pin,
    Pinned,
    Policy,
    Refused,
    Unpin,
    Unpinned,
)
from phloem.srt.wire import Wire

# --------------------------------------------------------------------------- request parameters


class LogprobsMode(StrEnum):
    """Which distribution logprobs are taken from."""

    RAW = "raw"  # the model's own: before bias, penalties, mask and temperature
    PROCESSED = "processed"  # after bias, penalties and mask, before temperature


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. Order: logit bias, penalties, mask, temperature, top-k, top-p,
    min-p, draw.

    `temperature` 0 is greedy (ties go to the lowest id). `top_k` 0 is off. `seed` None draws one
    at admission. `max_tokens` None means up to the context's end. Only `allowed_token_ids` are
    drawn, if there are any. `logprobs` is the number of top alternatives to report beside the
    sampled token, None for no logprobs at all; `prompt_logprobs` that of prompt tokens, by default
    the same; `logprob_token_ids` are reported as well, wherever a logprob is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()


class TokenLogprob(Wire, frozen=True):
    """Logprob of one token, and the top alternatives as parallel lists, best first. `chosen` are
    those of the `logprob_token_ids`, in their order."""

    token: int
    logprob: float
    top_tokens: list[int] = []
    top_logprobs: list[float] = []
    chosen: list[float] = []


class Draft(Wire, frozen=True):
    """What may follow a constrained row's last token, guessed: a step draws along it.

    The row draws a token after the first 0, `draws[1]`, `draws[2]`, … of `tokens`, and goes on from
    one draw to the next while it draws the token that stands there; those in between are forced.
    `draws[-1]` tokens are computed. If there are more, then the last draw decides on them all, and
    nothing but an end token may follow.
    """

    tokens: list[int]
    draws: list[int]

    @property
    def computed(self) -> int:
        """Tokens that have to be computed for the draws."""
        return self.draws[-1]

    @property
    def ends(self) -> bool:
        """Nothing is drawn behind the whole draft."""
        return self.draws[-1] < len(self.tokens)


# --------------------------------------------------------------------------- frontend → scheduler


class JumpForward(StrEnum):
    """Whether tokens that a constraint forces are appended without asking the model."""

    OFF = "off"
    EXACT = "exact"  # while one token is legal
    CANONICAL = "canonical"  # while one text is legal, in the tokenizer's own split


class Pooling(StrEnum):
    """Which hidden states of a prompt, after the model's last norm, make its embedding."""

    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # that of the last token


class CallPlan(Wire, frozen=True):
    """What a program says of what comes after a call (docs/programs.md); all of it may be wrong.

    `remaining` calls are not sent yet: 0 ends the program with those that are. `fork` of them go on
    from this one's prompt and answer. It is one of `width` siblings of a `group`, which are joined.
    `next_constraints` are those of calls to come.
    """

    remaining: int | None = None
    fork: int = 0
    group: str = ""
    width: int = 0
    next_constraints: list[Constraint] = []


class Submit(Wire, frozen=True, tag="submit"):
    """A request, tokenised. `prompt` is packed. `prompt_logprobs_from` asks for the logprobs of
    prompt tokens from that index on (index 0 has none). `deadline_s` counts from receipt.
    `namespace` keeps its KV apart from other namespaces' (tenant, cache salt). `tenant` is whom
    fair shares and quotas count it for; `program` names the program it is a call of, which may have
    a `plan`. `jump` is for constrained requests; one that wants logprobs does not jump, since each
    is sampled. `embed` asks for the prompt's embedding and nothing else: max_tokens is 0 then."""

    rid: str
    prompt: bytes
    sampling: SamplingParams
    constraint: Constraint | None = None
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    prompt_logprobs_from: int | None = None
    tenant: str = ""
    program: str = ""
    jump: JumpForward = JumpForward.OFF
    embed: Pooling | None = None
    plan: CallPlan | None = None


class Abort(Wire, frozen=True, tag="abort"):
    """The client left, or a stop string was found: no more steps for `rid`."""

    rid: str


class Flush(Wire, frozen=True, tag="flush"):
    """Drop all KV that no running request holds, of one namespace or of all, pinned or not.
    Answered with `Flushed`."""

    id: int
    namespace: str | None = None


class Drain(Wire, frozen=True, tag="drain"):
    """Accept nothing new, finish what runs, then answer `Drained`."""


class EndProgram(Wire, frozen=True, tag="end_program"):
    """No call of `program` follows: what it alone used may go first, and nothing is held for it.
    Not answered."""

    program: str


class Watch(Wire, frozen=True, tag="watch"):
    """Send `KvEvents` from now on, beginning with the tree as it is; or, `on` False, no more."""

    on: bool


Question = Flush | AskStats | AskTree | AskExplain | Pin | Unpin | AskPolicy
"""What is answered by exactly one `Answer` of the same id."""

ToScheduler = Submit | Abort | Drain | EndProgram | Watch | Question


# --------------------------------------------------------------------------- scheduler → frontend


class BackendReady(Wire, frozen=True, tag="ready"):
    """Worker and grammar process are up; requests may be submitted."""

    kv_slots: int
    context_length: int
    vocab_size: int
    max_running: int
    startup: dict[str, float]  # phase → seconds


class Accepted(Wire, frozen=True, tag="accepted"):
    """The constraint compiled and the request is queued: from here on it ends in exactly one
    `Tokens` with a finish reason, or one `Failed`."""

    rid: str


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client left


class Tokens(Wire, frozen=True, tag="tokens"):
    """New tokens of a request, and its end when `finish` is set.

    `forced_tokens` of its output so far were forced by its constraint, the others were sampled;
    `closed_by_budget` when the choice of one was narrowed so that its text is complete in time.
    `accepted_guesses` of the sampled ones were guessed in drafts, `rejected_guesses` were others.
    `cached_tokens` of the prompt were taken from the radix tree. `matched` is the token id that
    stopped it, if one did. `prompt_logprobs` comes once, with the first `Tokens`. A request of
    max_tokens 0 ends with no token at all. `embedding` (float32, little-endian) comes with the end
    of a request that asked for it.
    """

    rid: str
    tokens: list[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    matched: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    preemptions: int = 0
    queue_seconds: float = 0.0
    forced_tokens: int = 0
    closed_by_budget: bool = False
    embedding: bytes | None = None
    accepted_guesses: int = 0
    rejected_guesses: int = 0


class Failed(Wire, frozen=True, tag="failed"):
    """The one terminal reply of a request that ended in an error."""

    rid: str
    error: ErrorInfo


class Flushed(Wire, frozen=True, tag="flushed"):
    id: int
    tokens: int  # how many cached tokens were dropped


class Drained(Wire, frozen=True, tag="drained"):
    """Nothing runs or waits any more."""


class StatsSnapshot(Wire, frozen=True, tag="stats"):
    """Counters since start (`*_total`) and gauges, sent about once a second and on change.

    A snapshot is also the heartbeat: `steps_total` shows progress.
    """

    running: int = 0
    waiting: int = 0
    compiling: int = 0
    kv_slots: int = 0
    kv_free: int = 0
    kv_evictable: int = 0  # cached, unlocked tokens
    kv_locked: int = 0  # cached tokens a running request holds
    kv_private: int = 0  # tokens of running requests not (yet) in the tree
    tree_nodes: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    computed_prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    forced_tokens_total: int = 0
    accepted_guesses_total: int = 0
    rejected_guesses_total: int = 0
    evicted_tokens_total: int = 0
    preemptions_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    failed_total: int = 0
    grammar_compiles_total: int = 0
    grammar_compile_seconds_total: float = 0.0
    grammar_cache_hits_total: int = 0
    bad_messages_total: int = 0
    step_seconds_total: float = 0.0  # plan sent → result applied
    schedule_seconds_total: float = 0.0  # of that, time in the scheduler itself
    forward_seconds_total: float = 0.0
    mask_wait_seconds_total: float = 0.0
    sample_seconds_total: float = 0.0


Answer = Flushed | CacheStats | CacheTree | CacheExplanation | Pinned | Unpinned | Policy | Refused

ToFrontend = BackendReady | Accepted | Tokens | Failed | Drained | StatsSnapshot | KvEvents | Answer


# --------------------------------------------------------------------------- scheduler → worker


class RowStart(Wire, frozen=True):
    """What the worker must know of a row when it first sees it, or sees it again after preemption.

    `prefix_slots` (packed) hold the KV of tokens [0, start of this step's tokens). `stop_ids` are
    all ids that end the request, banned until `min_tokens` were produced. `history` (packed) is
    every token before this step's, sent only when penalties need it. `prompt_len` separates
    prompt from output in the row's sequence. A row that is to `embed` samples nothing; for a mean
    it has no prefix.
    """

    prompt_len: int
    prefix_slots: bytes
    sampling: SamplingParams
    seed: int
    stop_ids: list[int]
    history: bytes = b""
    prompt_logprobs_from: int | None = None
    embed: Pooling | None = None


class RowPlan(Wire, frozen=True):
    """One row's work in a step: compute `tokens` (packed) into `slots` (packed, same count).

    Empty `tokens` with one slot means "your last sampled token". `epoch` names one admission of
    one request: a row whose epoch changed is new and comes with `start`. `sample` says that the
    sequence is complete with this step, so a token is to be drawn; `masked` that the draw waits
    for this row's vocabulary mask. With a `draft` there are slots for its `computed` tokens, too,
    behind the others; the masks of its draws, but for the first, are in the rows of the mask buffer
    from `draft_row` on.
    """

    row: int
    epoch: int
    tokens: bytes
    slots: bytes
    sample: bool
    masked: bool = False
    start: RowStart | None = None
    draft: Draft | None = None
    draft_row: int = 0

    @property
    def drafted(self) -> int:
        """Tokens to compute that are only guessed."""
        return 0 if self.draft is None else self.draft.computed


class StepPlan(Wire, frozen=True, tag="step"):
    step_id: int
    rows: list[RowPlan]


class StopWorker(Wire, frozen=True, tag="stop"):
    """Leave in good order."""


ToWorker = StepPlan | StopWorker


# --------------------------------------------------------------------------- worker → scheduler


class WorkerReady(Wire, frozen=True, tag="worker_ready"):
    kv_slots: int  # slots of the pool, slot 0 (padding) included
    context_length: int
    vocab_size: int
    eos_ids: list[int]
    startup: dict[str, float]


class RowResult(Wire, frozen=True):
    """What a row gave. `token` is -1 when nothing was sampled or `error` is set; the error is its
    constraint's own if it has a `fault`, the code of that. `accepted` tokens of the row's draft
    come before `token`; behind a draft that ends and was accepted whole there is none. `embedding`
    comes with the last token of a prompt that is embedded."""

    epoch: int
    token: int = -1
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of this step's prompt tokens, in order
    error: str | None = None
    fault: str = ""
    closing: bool = False
    embedding: bytes | None = None
    accepted: int = 0


class StepResult(Wire, frozen=True, tag="result"):
    """Outcome of step `step_id`, rows in the plan's order. `error` set: the forward pass itself
    failed, no row has valid KV for this step's tokens."""

    step_id: int
    rows: list[RowResult]
    forward_seconds: float = 0.0
    mask_wait_seconds: float = 0.0
    sample_seconds: float = 0.0
    error: str | None = None


FromWorker = WorkerReady | StepResult


# --------------------------------------------------------------------------- scheduler → grammar


class GrammarCompile(Wire, frozen=True, tag="compile"):
    """Compile `constraint`, known from now on by `key`; answered with `GrammarCompiled`."""

    key: str
    constraint: Constraint


class GrammarRow(Wire, frozen=True):
    """Bring request `uid`'s matcher (of grammar `key`) to its history and fill its mask.

    `tokens` are the sampled tokens from index `at` of the request's output on. A matcher that is
    further than `at` rolls back; one that is not that far (it was rebuilt after a kill) is asked
    for again with `at` 0 by `GrammarReplay`. `left` tokens may follow these. `mask_row` is the row
    of the mask buffer to fill, and for the further draws of a `draft` those from `draft_row` on.
    """

    uid: int
    key: str
    at: int
    tokens: list[int]
    left: int
    mask_row: int
    draft: Draft | None = None
    draft_row: int = 0


class GrammarStep(Wire, frozen=True, tag="masks"):
    """Fill the masks that step `step_id` samples with, into buffer `step_id % 2`, then tell the
    worker with `StepMasks`."""

    step_id: int
    rows: list[GrammarRow]


class GrammarJumpRow(Wire, frozen=True):
    """Bring request `uid`'s matcher to its history, as in `GrammarRow`, and past the tokens that
    are forced from there. A draft of at most `draft` tokens is wanted of what comes then; with 0
    the history is still learnt from, for drafts of others in the same `namespace`."""

    uid: int
    key: str
    at: int
    tokens: list[int]
    left: int
    jump: JumpForward
    draft: int | None = None
    namespace: str = ""


class GrammarJump(Wire, frozen=True, tag="jump"):
    """Find what is forced; answered with `GrammarJumped`."""

    rows: list[GrammarJumpRow]


class GrammarClose(Wire, frozen=True, tag="close"):
    """These requests are over; their matchers may go."""

    uids: list[int]


class StopGrammar(Wire, frozen=True, tag="stop"):
    """Leave in good order."""


ToGrammar = GrammarCompile | GrammarStep | GrammarJump | GrammarClose | StopGrammar


# --------------------------------------------------------------------------- grammar → scheduler


class GrammarReady(Wire, frozen=True, tag="grammar_ready"):
    """The process is up and knows nothing: compile what is live again, replay on demand. What
    earlier runs compiled is `remembered`, the last used first."""

    startup: dict[str, float]
    remembered: list[Constraint] = []


class GrammarCompiled(Wire, frozen=True, tag="compiled"):
    """`error` None: the grammar of `key` is ready. `cached` when nothing had to be compiled.
    `minimum` tokens complete a text of it; None when that is not known."""

    key: str
    error: ErrorInfo | None
    seconds: float
    cached: bool = False
    minimum: int | None = None


class GrammarReplay(Wire, frozen=True, tag="replay"):
    """These matchers are behind or unknown: send their rows of step `step_id` again, from 0."""

    step_id: int
    uids: list[int]


class Forced(Wire, frozen=True):
    """Tokens that request `uid`'s matcher has accepted beyond its history, perhaps none. `ends`:
    nothing but an end token is legal behind them. `draft` is what may follow them, if that can be
    guessed."""

    uid: int
    tokens: list[int]
    ends: bool = False
    draft: Draft | None = None


class GrammarJumped(Wire, frozen=True, tag="jumped"):
    """One entry for each row of a `GrammarJump`, in its order."""

    rows: list[Forced]


FromGrammar = GrammarReady | GrammarCompiled | GrammarReplay | GrammarJumped


# --------------------------------------------------------------------------- grammar → worker


class StepMasks(Wire, frozen=True, tag="step_masks"):
    """Masks of these `rows` (mask_row indices) of step `step_id` are in the buffer; `failed` rows
    have none, with the reason: they end in an error, their neighbours do not notice. Those in
    `faults` failed by their constraint, in the way that the code says. Those in `closing` lack
    tokens after which the text could not be completed in what is left."""

    step_id: int
    rows: list[int]
    failed: dict[int, str] = {}
    faults: dict[int, str] = {}
    closing: list[int] = []
