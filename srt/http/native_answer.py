"""Native answers: engine chunks → the reply so far. A streamed event repeats the whole text."""

from __future__ import annotations

import time

from phloem.srt.generation import Chunk, Finish, Logprob
from phloem.srt.http.logprobs import finite
from phloem.srt.http.native_protocol import Entry, MetaInfo, NativeReply
from phloem.srt.messages import FinishReason


class NativeAnswer:
    """One sequence as it grows.

    `first` names the prompt's first token, which has no logprob, when the prompt's logprobs are
    wanted from there. Lists that were not asked for stay empty. `with_text` puts the tokens' texts
    into the logprob entries.
    """

    def __init__(
        self,
        rid: str,
        *,
        return_logprob: bool,
        top: int,
        with_text: bool,
        first: Logprob | None,
    ) -> None:
        self._rid = rid
        self._started = time.perf_counter()
        self._return_logprob = return_logprob
        self._top = top
        self._with_text = with_text
        self._first = first
        self._text: list[str] = []
        self._ids: list[int] = []
        self._input: list[Entry] = []
        self._input_top: list[list[Entry] | None] = []
        self._output: list[Entry] = []
        self._output_top: list[list[Entry]] = []
        self._last = Chunk(rid=rid)

    def add(self, chunk: Chunk) -> None:
        self._last = chunk
        self._text.append(chunk.text)
        self._ids += chunk.token_ids
        for one in chunk.logprobs or ():
            self._output.append(self._entry(one))
            self._output_top.append([self._entry(top) for top in one.top])
        for prompt in chunk.prompt_logprobs or ():
            self._add_prompt(prompt)

    def reply(self, index: int | None = None) -> NativeReply:
        """The answer so far; `index` only where a stream has several."""
        text = "".join(self._text)
        self._text = [text]
        last = self._last
        want, want_top = self._return_logprob, self._return_logprob and self._top > 0
        meta = MetaInfo(
            id=self._rid,
            finish_reason=_finish_reason(last.finish, last.completion_tokens),
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
            cached_tokens=last.cached_tokens,
            forced_tokens=last.forced_tokens,
            num_retractions=last.preemptions,
            e2e_latency=time.perf_counter() - self._started,
            queue_time=last.queue_seconds,
            input_token_logprobs=self._input if want else None,
            output_token_logprobs=self._output if want else None,
            output_token_logprobs_length=len(self._output) if want else None,
            input_top_logprobs=self._input_top if want_top else None,
            output_top_logprobs=self._output_top if want_top else None,
            constraint=last.constraint,
        )
        return NativeReply(text=text, output_ids=self._ids, meta_info=meta, index=index)

    def _add_prompt(self, one: Logprob | None) -> None:
        if one is not None:
            self._input.append(self._entry(one))
            self._input_top.append([self._entry(top) for top in one.top])
        elif self._first is not None:
            text = self._first.text if self._with_text else None
            self._input.append((None, self._first.token_id, text))
            self._input_top.append(None)

    def _entry(self, one: Logprob) -> Entry:
        return (finite(one.logprob), one.token_id, one.text if self._with_text else None)


def _finish_reason(finish: Finish | None, length: int) -> dict[str, str | int | None] | None:
    if finish is None:
        return None
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": length}
    if finish.reason is FinishReason.ABORT:
        return {"type": "abort", "message": "The request was aborted."}
    return {"type": "stop", "matched": finish.matched}
