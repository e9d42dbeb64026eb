"""From sampled token ids to the text a client sees: one `AnswerBuilder` a request."""

from __future__ import annotations

from phloem.srt.generation import Chunk, Finish, GenerateRequest, Logprob
from phloem.srt.messages import FinishReason, TokenLogprob, Tokens
from phloem.srt.tokenizer.detokenize import IncrementalDetokenizer, StopStrings
from phloem.srt.tokenizer.thought_counter import ThoughtCounter
from phloem.srt.tokenizer.tokenizer import Tokenizer


class AnswerBuilder:
    """Feeds `Tokens` messages in, gives `Chunk`s out; ends early when a stop string appears.

    Text is held back while it may be the beginning of a stop string or the middle of a character,
    so that what was sent never has to be taken back.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerateRequest, rid: str, prompt_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._min_tokens = request.sampling.min_tokens
        self._hide_stop_token = not request.include_stop
        self._completion_tokens = 0
        self._text = IncrementalDetokenizer(tokenizer, skip_special=request.skip_special_tokens)
        self._stops = StopStrings(
            request.stop, patterns=request.stop_regex, include_stop=request.include_stop
        )
        self._chosen = request.sampling.logprob_token_ids
        self._thoughts = None if request.thoughts is None else ThoughtCounter(request.thoughts)

    def accepted(self) -> Chunk:
        """The first chunk: no text yet."""
        return Chunk(rid=self._rid, prompt_tokens=self._prompt_tokens)

    def add(self, message: Tokens) -> Chunk:
        """The next chunk. Its `finish` is set by the scheduler's end or by a stop string."""
        finish = None
        if message.finish is not None:
            finish = Finish(reason=message.finish, matched=message.matched)
        text = ""
        for token in message.tokens:
            self._completion_tokens += 1
            if finish is not None and finish.matched == token and self._hide_stop_token:
                continue
            piece = self._text.feed([token])
            if self._thoughts is not None:
                self._thoughts.add(piece)
            if self._completion_tokens <= self._min_tokens:
                text += piece
                continue
            text += self._stops.feed(piece)
            if self._stops.matched is not None:
                finish = Finish(reason=FinishReason.STOP, matched=self._stops.matched)
                break
        if finish is not None and self._stops.matched is None:
            text += self._stops.feed(self._text.finish())
            if self._stops.matched is not None:
                finish = Finish(reason=FinishReason.STOP, matched=self._stops.matched)
            text += self._stops.finish()
        return Chunk(
            rid=self._rid,
            text=text,
            token_ids=message.tokens,
            logprobs=None if message.logprobs is None else self._logprobs(message.logprobs),
            prompt_logprobs=self._prompt_logprobs(message),
            finish=finish,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=message.cached_tokens,
            preemptions=message.preemptions,
            queue_seconds=message.queue_seconds,
            forced_tokens=message.forced_tokens,
            accepted_guesses=message.accepted_guesses,
            rejected_guesses=message.rejected_guesses,
            reasoning_tokens=0 if self._thoughts is None else self._thoughts.count,
            closed_by_budget=message.closed_by_budget,
            embedding=message.embedding,
        )

    def _logprobs(self, entries: list[TokenLogprob]) -> list[Logprob]:
        return [self._logprob(entry) for entry in entries]

    def _prompt_logprobs(self, message: Tokens) -> list[Logprob | None] | None:
        if message.prompt_logprobs is None:
            return None
        return [None if e is None else self._logprob(e) for e in message.prompt_logprobs]

    def _logprob(self, entry: TokenLogprob) -> Logprob:
        top = zip(entry.top_tokens, entry.top_logprobs, strict=True)
        chosen = zip(self._chosen, entry.chosen, strict=True)
        return Logprob(
            token_id=entry.token,
            text=self._tokenizer.token_text(entry.token),
            data=self._tokenizer.token_bytes(entry.token),
            logprob=entry.logprob,
            top=[self._named(token, logprob) for token, logprob in top],
            chosen=[self._named(token, logprob) for token, logprob in chosen],
        )

    def _named(self, token: int, logprob: float) -> Logprob:
        return Logprob(
            token_id=token,
            text=self._tokenizer.token_text(token),
            data=self._tokenizer.token_bytes(token),
            logprob=logprob,
        )
