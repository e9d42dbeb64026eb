"""Native answers: engine chunks → the reply so far. A streamed event repeats the whole text, or
with `incremental` says what is new."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from phloem.srt.generation import Chunk, Finish, Logprob
from phloem.srt.http.logprobs import finite
from phloem.srt.http.native_protocol import Entry, MetaInfo, NativeReply
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import FinishReason


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply has beside the text. `top` is a number of alternatives, `chosen` says that
    tokens were chosen by their ids; `with_text` puts the tokens' texts into the logprob entries;
    `first` names the prompt's first token, which has no logprob, when the prompt's logprobs are
    wanted from there; `prompt` are the prompt's ids, to be repeated."""

    logprobs: bool
    top: int = 0
    chosen: bool = False
    with_text: bool = False
    first: Logprob | None = None
    prompt: list[int] | None = None


class NativeAnswer:
    """One sequence as it grows. Lists that were not asked for stay empty."""

    def __init__(
        self, rid: str, wanted: Wanted, warnings: Warnings, *, incremental: bool = False
    ) -> None:
        self._rid = rid
        self._started = time.perf_counter()
        self._wanted = wanted
        self._warnings = warnings
        self._incremental = incremental
        self._text: list[str] = []
        self._ids: list[int] = []
        self._input: list[Entry] = []
        self._input_top: list[list[Entry] | None] = []
        self._input_chosen: list[list[Entry] | None] = []
        self._output: list[Entry] = []
        self._output_top: list[list[Entry]] = []
        self._output_chosen: list[list[Entry]] = []
        self._outputs = 0
        self._last = Chunk(rid=rid)

    def add(self, chunk: Chunk) -> None:
        self._warnings.see(chunk)
        self._last = chunk
        self._text.append(chunk.text)
        self._ids += chunk.token_ids
        for one in chunk.logprobs or ():
            self._output.append(self._entry(one))
            self._output_top.append(self._entries(one.top))
            self._output_chosen.append(self._entries(one.chosen))
        self._outputs += len(chunk.logprobs or ())
        for prompt in chunk.prompt_logprobs or ():
            self._add_prompt(prompt)

    def reply(self, index: int | None = None) -> NativeReply:
        """The answer so far; `index` only where a stream has several."""
        text = "".join(self._text)
        wanted, last = self._wanted, self._last
        want, top, chosen = (
            wanted.logprobs,
            wanted.logprobs and wanted.top > 0,
            wanted.logprobs and wanted.chosen,
        )
        meta = MetaInfo(
            id=self._rid,
            finish_reason=_finish_reason(last.finish, last.completion_tokens),
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
            cached_tokens=last.cached_tokens,
            forced_tokens=last.forced_tokens,
            accepted_prediction_tokens=last.accepted_guesses,
            rejected_prediction_tokens=last.rejected_guesses,
            num_retractions=last.preemptions,
            e2e_latency=time.perf_counter() - self._started,
            queue_time=last.queue_seconds,
            input_token_logprobs=self._input if want else None,
            output_token_logprobs=self._output if want else None,
            output_token_logprobs_length=self._outputs if want else None,
            input_top_logprobs=self._input_top if top else None,
            output_top_logprobs=self._output_top if top else None,
            input_token_ids_logprobs=self._input_chosen if chosen else None,
            output_token_ids_logprobs=self._output_chosen if chosen else None,
            constraint=last.constraint,
            warnings=self._warnings.told if last.finish is not None else UNSET,
        )
        reply = NativeReply(
            text=text,
            output_ids=self._ids,
            meta_info=meta,
            index=index,
            prompt_token_ids=wanted.prompt,
        )
        if self._incremental:
            self._forget()
        else:
            self._text = [text]
        return reply

    def _forget(self) -> None:
        """What was said is not said again."""
        self._text, self._ids = [], []
        self._input, self._input_top, self._input_chosen = [], [], []
        self._output, self._output_top, self._output_chosen = [], [], []

    def _add_prompt(self, one: Logprob | None) -> None:
        if one is not None:
            self._input.append(self._entry(one))
            self._input_top.append(self._entries(one.top))
            self._input_chosen.append(self._entries(one.chosen))
        elif (first := self._wanted.first) is not None:
            text = first.text if self._wanted.with_text else None
            self._input.append((None, first.token_id, text))
            self._input_top.append(None)
            self._input_chosen.append(None)

    def _entries(self, logprobs: list[Logprob]) -> list[Entry]:
        return [self._entry(one) for one in logprobs]

    def _entry(self, one: Logprob) -> Entry:
        text = one.text if self._wanted.with_text else None
        return (finite(one.logprob), one.token_id, text)


def _finish_reason(finish: Finish | None, length: int) -> dict[str, str | int | None] | None:
    if finish is None:
        return None
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": length}
    if finish.reason is FinishReason.ABORT:
        return {"type": "abort", "message": "The request was aborted."}
    return {"type": "stop", "matched": finish.matched}
