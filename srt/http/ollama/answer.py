"""Engine chunks → replies of `/api/generate` and `/api/chat`, whole or line by line.

A tool call is one line, when its arguments are complete; one that was cut off is no call.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk
from phloem.srt.generation import Logprob as EngineLogprob
from phloem.srt.http.choice import Choice
from phloem.srt.http.logprobs import finite
from phloem.srt.http.ollama.replies import (
    AnswerTurn,
    CalledFunction,
    ChatReply,
    GenerateReply,
    Logprob,
    Reply,
    TokenLogprob,
    ToolCall,
    timestamp,
)
from phloem.srt.http.tool_parser import AnswerParser, Piece, Reasoning, ToolArguments, ToolStart
from phloem.srt.http.warning import Warnings


class Stopwatch:
    """When a request came (now), was submitted, had its first token, and ended; nanoseconds."""

    def __init__(self) -> None:
        self._began = self._submitted = time.monotonic_ns()
        self._first: int | None = None
        self._queued = 0

    def submit(self) -> None:
        """The engine is asked now."""
        self._submitted = time.monotonic_ns()

    def see(self, chunk: Chunk) -> None:
        if self._first is None and chunk.completion_tokens:
            self._first = time.monotonic_ns()
            self._queued = int(chunk.queue_seconds * 1e9)

    def durations(self) -> dict[str, int]:
        """Fields of a `Reply` that ends now. The three parts add up to the whole."""
        now = time.monotonic_ns()
        first = now if self._first is None else self._first
        prompt_began = min(self._submitted + self._queued, first)
        return {
            "total_duration": now - self._began,
            "load_duration": prompt_began - self._began,
            "prompt_eval_duration": first - prompt_began,
            "eval_duration": now - first,
        }


@dataclass(frozen=True)
class Said:
    """What one line says."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[ToolCall] = ()


class _Answer(ABC):
    """One answer, of the one sequence that a request has."""

    def __init__(
        self, model: str, parser: AnswerParser, watch: Stopwatch, warnings: Warnings
    ) -> None:
        self._model = model
        self._warnings = warnings
        self._choice = Choice(0, parser)
        self._watch = watch
        self._calls = _Calls()

    def add(self, index: int, chunk: Chunk) -> None:
        self._see(chunk)
        self._choice.add(chunk)

    def whole(self) -> Reply:
        choice = self._choice
        calls = [_call(start, i, text) for i, (start, text) in enumerate(choice.calls)]
        said = Said(choice.content, choice.reasoning, [call for call in calls if call is not None])
        return self._line(said, logprobs=_logprobs(choice.logprobs), **self._end())

    def frames(self, index: int, chunk: Chunk) -> Iterator[Reply]:
        self._see(chunk)
        logprobs = _logprobs(chunk.logprobs)
        lines = [said for piece in self._choice.add(chunk) if (said := self._said(piece))]
        if logprobs is not UNSET and not lines:
            lines = [Said()]  # a token whose text is held back
        for said in lines:
            yield self._line(said, done=False, logprobs=logprobs)
            logprobs = UNSET

    def closing(self) -> Iterator[Reply]:
        yield self._line(Said(), **self._end())

    def _see(self, chunk: Chunk) -> None:
        self._watch.see(chunk)
        self._warnings.see(chunk)

    def _said(self, piece: Piece) -> Said | None:
        if isinstance(piece, str):
            return Said(content=piece)
        if isinstance(piece, Reasoning):
            return Said(thinking=piece.text)
        call = self._calls.feed(piece)
        return None if call is None else Said(calls=[call])

    def _end(self) -> dict[str, Any]:
        choice = self._choice
        last = choice.last
        assert last is not None
        return {
            "done": True,
            "done_reason": choice.ended().reason.value,
            "prompt_eval_count": last.prompt_tokens,
            "eval_count": last.completion_tokens,
            "constraint": choice.constraint or UNSET,
            "warnings": self._warnings.told,
            **self._watch.durations(),
        }

    @abstractmethod
    def _line(self, said: Said, **fields: Any) -> Reply: ...


class ChatAnswer(_Answer):
    """Of `POST /api/chat`."""

    def _line(self, said: Said, **fields: Any) -> ChatReply:
        turn = AnswerTurn(
            content=said.content,
            thinking=said.thinking or UNSET,
            tool_calls=list(said.calls) or UNSET,
        )
        return ChatReply(model=self._model, created_at=timestamp(), message=turn, **fields)


class GenerateAnswer(_Answer):
    """Of `POST /api/generate`. With `prompt`, the end has `context`: its ids and those of the
    answer, as the model wrote it, but for the token that ended it."""

    def __init__(
        self,
        model: str,
        parser: AnswerParser,
        watch: Stopwatch,
        warnings: Warnings,
        prompt: Sequence[int] | None,
    ) -> None:
        super().__init__(model, parser, watch, warnings)
        self._context = None if prompt is None else list(prompt)

    def add(self, index: int, chunk: Chunk) -> None:
        self._remember(chunk)
        super().add(index, chunk)

    def frames(self, index: int, chunk: Chunk) -> Iterator[Reply]:
        self._remember(chunk)
        return super().frames(index, chunk)

    def _remember(self, chunk: Chunk) -> None:
        if self._context is None:
            return
        ids = chunk.token_ids
        ended = chunk.finish is not None and ids and chunk.finish.matched == ids[-1]
        self._context += ids[:-1] if ended else ids

    def _end(self) -> dict[str, Any]:
        return {**super()._end(), "context": UNSET if self._context is None else self._context}

    def _line(self, said: Said, **fields: Any) -> GenerateReply:
        return GenerateReply(
            model=self._model,
            created_at=timestamp(),
            response=said.content,
            thinking=said.thinking or UNSET,
            **fields,
        )


class _Calls:
    """Tool calls as their pieces come."""

    def __init__(self) -> None:
        self._start: ToolStart | None = None
        self._arguments = ""

    def feed(self, piece: ToolStart | ToolArguments) -> ToolCall | None:
        """The call that `piece` completes, once."""
        if isinstance(piece, ToolStart):
            self._start, self._arguments = piece, ""
            return None
        self._arguments += piece.text
        if self._start is None or not self._arguments.rstrip().endswith("}"):
            return None
        call = _call(self._start, self._start.index, self._arguments)
        if call is not None:
            self._start = None
        return call


def _call(start: ToolStart, index: int, text: str) -> ToolCall | None:
    """None while the arguments are no whole object."""
    try:
        arguments = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return None
    return ToolCall(
        id=start.id, function=CalledFunction(index=index, name=start.name, arguments=arguments)
    )


def _logprobs(logprobs: Sequence[EngineLogprob] | None) -> list[Logprob] | UnsetType:
    if not logprobs:
        return UNSET
    return [
        Logprob(
            token=one.text,
            logprob=finite(one.logprob),
            bytes=list(one.data),
            top_logprobs=[
                TokenLogprob(token=top.text, logprob=finite(top.logprob), bytes=list(top.data))
                for top in one.top
            ]
            or UNSET,
        )
        for one in logprobs
    ]
