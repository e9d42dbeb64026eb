"""What the engine takes and what it gives: the one request type and the one event stream that
every protocol (OpenAI, native, DSL) is a thin translation to and from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Raw, UnsetType

from phloem.constrained.spec import Constraint
from phloem.srt.errors import InternalError
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import (
    Answer,
    CallPlan,
    FinishReason,
    JumpForward,
    Pooling,
    Question,
    SamplingParams,
    StatsSnapshot,
)


class Thoughts(msgspec.Struct, frozen=True):
    """Where reasoning lies in an answer: from `begin`, with which the answer begins if there is
    any, to `end`. With `opened` the prompt has the `begin`."""

    begin: str
    end: str
    opened: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `n > 1` is n of these with the same prompt (computed once).

    `prompt` is token ids, or text in which the model's control tokens are recognised (chat prompts
    are rendered to ids by the chat template, where control markup inside user text stays text).
    Generation ends before the first of `stop`, or of what a pattern of `stop_regex` matches, unless
    `include_stop`. `prompt_logprobs_from` asks for logprobs of prompt tokens from that index on.
    `tenant` is whom it counts for; `program` the program it is a call of, `plan` what that says of
    calls to come. `jump` says what becomes of tokens that the constraint forces; where logprobs are
    asked for, every token is sampled.
    `embed` asks for the prompt's embedding, and for nothing else: then `sampling.max_tokens` is 0,
    and there is no constraint. `thoughts` has the tokens of the model's reasoning counted.
    """

    prompt: str | list[int]
    sampling: SamplingParams = SamplingParams()
    rid: str | None = None
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    prompt_logprobs_from: int | None = None
    tenant: str = ""
    program: str = ""
    plan: CallPlan | None = None
    jump: JumpForward = JumpForward.CANONICAL
    embed: Pooling | None = None
    thoughts: Thoughts | None = None


class Logprob(msgspec.Struct, frozen=True):
    """A token's text, its exact bytes, and its logprob; `top` are the best alternatives, `chosen`
    the `logprob_token_ids`."""

    token_id: int
    text: str
    data: bytes
    logprob: float
    top: list[Logprob] = []
    chosen: list[Logprob] = []


class Finish(msgspec.Struct, frozen=True):
    """How a request ended. `matched` is the stop string, the pattern or the token id that ended
    it."""

    reason: FinishReason
    matched: str | int | None = None


class ConstraintOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a constraint in one finished answer.

    `complete`: the answer is a whole text of its constraint, and not the beginning of one that was
    cut. `valid`: an independent validator was asked, and what it said. `closed_by_budget`: tokens
    were left out of the choice so that it is whole within `max_tokens`. `enforcement` is `partial`
    only with `strict: false`; the lists are then JSON pointers into the schema: of what the mask
    enforced, of what was left to the validator, and of what nobody checks. With `full`,
    `unsupported` names what JSON Schema takes for an annotation.
    """

    kind: str
    enforcement: Literal["full", "partial"]
    complete: bool
    valid: bool | None = None
    closed_by_budget: bool = False
    enforced: list[str] | UnsetType = UNSET
    validated: list[str] | UnsetType = UNSET
    unsupported: list[str] | UnsetType = UNSET


class FieldValue(msgspec.Struct, frozen=True):
    """A finished value of a JSON answer: its JSON pointer, and its JSON text."""

    path: str
    value: Raw


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer, in order. The texts of all chunks joined are the whole text.

    The first chunk comes when the request was accepted (its constraint compiled, its place in the
    queue taken) and has no text: whoever waits for it can still answer with an error status. The
    last one has `finish`. Counts are totals so far. `cached_tokens` of the prompt were taken from
    the radix tree when the request was first admitted; it is 0 before the first token.
    `forced_tokens` of the output were forced by its constraint and not sampled; `accepted_guesses`
    were sampled and had been guessed in drafts, `rejected_guesses` were other guesses;
    `reasoning_tokens` are those of its `Thoughts`, with their marks.
    `prompt_logprobs` comes once; its first entry is None when it begins at token 0. `constraint`
    comes with `finish`, `fields` with the text that completes them, both from the HTTP layer.
    `embedding` comes with `finish`: float32, little-endian, `ModelCard.embedding_length` of them,
    as the model gave them (not normalised).
    """

    rid: str
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish: Finish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    forced_tokens: int = 0
    accepted_guesses: int = 0
    rejected_guesses: int = 0
    reasoning_tokens: int = 0
    closed_by_budget: bool = False
    constraint: ConstraintOutcome | None = None
    fields: list[FieldValue] = []
    embedding: bytes | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer: the chunks of one request, joined."""

    rid: str
    text: str
    token_ids: list[int]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    forced_tokens: int = 0
    accepted_guesses: int = 0
    rejected_guesses: int = 0
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None


async def collect(chunks: AsyncIterator[Chunk]) -> Completion:
    """Join all chunks of one request. Errors of the stream pass through."""
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob | None] | None = None
    async for chunk in chunks:
        texts.append(chunk.text)
        ids += chunk.token_ids
        logprobs += chunk.logprobs or []
        prompt_logprobs = prompt_logprobs or chunk.prompt_logprobs
        if chunk.finish is not None:
            return Completion(
                rid=chunk.rid,
                text="".join(texts),
                token_ids=ids,
                finish=chunk.finish,
                prompt_tokens=chunk.prompt_tokens,
                completion_tokens=chunk.completion_tokens,
                cached_tokens=chunk.cached_tokens,
                forced_tokens=chunk.forced_tokens,
                accepted_guesses=chunk.accepted_guesses,
                rejected_guesses=chunk.rejected_guesses,
                logprobs=logprobs or None,
                prompt_logprobs=prompt_logprobs,
            )
    raise InternalError("the answer ended without a finish reason")


ToolFormatName = Literal["hermes", "llama3", "mistral", "mistral-args", "json"]


class ReasoningMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What a model thinks before it answers stands between `begin` and `end`. Its chat template
    turns that on or off by the variable `switch`, if it can, and knows `efforts` or not."""

    begin: str
    end: str
    switch: str | None = None
    efforts: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the server may say of the model it serves.

    Embeddings have `embedding_length` numbers. `pooling` is how its checkpoint says they are made
    (a model that was not made for it says nothing: the mean), and `end_id`, if it wants one, the
    token that it wants behind each text. Calls of tools are written in `tool_format`; a model that
    thinks has `reasoning`. `chat_template` is Jinja, empty where there is none.
    """

    name: str
    path: str
    format: str  # as in "gguf Q4_1" or "safetensors bfloat16"
    architecture: str
    created: int
    vocab_size: int
    context_length: int
    kv_slots: int
    embedding_length: int
    page_size: int = 1
    pooling: Pooling = Pooling.MEAN
    end_id: int | None = None
    tool_format: ToolFormatName = "json"
    reasoning: ReasoningMarks | None = None
    chat_template: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Liveness and readiness. `live` is False when the backend is down or makes no heartbeat."""

    live: bool
    ready: bool
    reason: str = ""
    restarts: int = 0
    heartbeat_age_s: float = 0.0


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat message as templates see it; `content` is text by now."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class InfillPrompt(NamedTuple):
    """A prompt for the text of a gap; `stop_token_ids` end it beside the model's end tokens."""

    ids: list[int]
    stop_token_ids: tuple[int, ...] = ()


class EngineClient(Protocol):
    """The engine as the HTTP layer sees it (tests drive the routes with a scripted one)."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def stats(self) -> StatsSnapshot: ...

    def health(self) -> Health: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request. Errors are raised as `PhloemError`; before the first chunk they
        mean that nothing was computed. Closing the iterator aborts the request."""
        ...

    async def tokenize(
        self, text: str, *, special: bool = True, opening: bool = True, inside: bool = False
    ) -> list[int]:
        """Text → ids: with `special` those of a prompt (control tokens are recognised, and with
        `opening` the model's opening token is put in front), without it those of plain text, and
        `inside` of plain text that goes on from other text."""
        ...

    async def infill(self, before: str, behind: str) -> InfillPrompt:
        """The prompt for what lies between two texts. Raises `InvalidRequest` when the model was
        not made for it."""
        ...

    async def detokenize(self, ids: list[int], *, skip_special: bool = False) -> str: ...

    async def render_chat(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, object]] | None = None,
        template_kwargs: dict[str, object] | None = None,
        documents: list[dict[str, object]] | None = None,
    ) -> list[int]:
        """The chat prompt as token ids. Raises `InvalidRequest` with the template's own reason."""
        ...

    async def flush(self) -> int:
        """Drop all unlocked KV; the number of tokens dropped."""
        ...

    async def ask(self, question: Question) -> Answer:
        """Ask the scheduler; the question's `id` is set here. Raises `PhloemError`, also for what
        it refuses: a `Refused` is never returned."""
        ...

    def watch(self) -> AsyncGenerator[KvEvents, None]:
        """The tree as it is (first comes `Cleared`), then every change of it. Raises `Unavailable`
        when the backend goes, or when the reader is too slow. Close it when done."""
        ...

    def end_program(self, program: str) -> None:
        """No call of `program` follows."""
        ...

    def abort(self, rid: str) -> bool:
        """End a request by its exact id; False when there is none."""
        ...

    def abort_all(self) -> int:
        """End every request; how many there were."""
        ...
