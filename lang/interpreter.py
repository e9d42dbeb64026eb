"""What `gen`, `select` and `join` do on the event loop: prompt in, outcome out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from phloem.constrained.spec import Constraint
from phloem.lang.backend.base import Call, ChatPrompt, Delta, TokenLogprob, Usage
from phloem.lang.backend.selecting import select
from phloem.lang.checking import satisfied
from phloem.lang.errors import BackendError, BackendUnavailable, Truncated
from phloem.lang.ir import Gen, Select
from phloem.lang.prompt import Event, Prompt, transcript
from phloem.lang.reasoning import Splitter
from phloem.lang.run import Run
from phloem.lang.variable import Meta, Outcome, Variable


@dataclass(slots=True)
class _Answer:
    """One of the `n` answers while it grows."""

    splitter: Splitter | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    matched: str | int | None = None

    def add(self, delta: Delta) -> tuple[str, str]:
        """What was thought and said more."""
        if self.finish and (delta.text or delta.finish):
            raise BackendError(f"answer {delta.index} goes on after its end")
        thought, said = self._apart(delta)
        self.thoughts.append(thought)
        self.texts.append(said)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.matched = delta.finish, delta.matched
        return thought, said

    def _apart(self, delta: Delta) -> tuple[str, str]:
        if delta.reasoning:
            self.splitter = None  # the server tells the two apart
        if self.splitter is None:
            return delta.reasoning, delta.text
        thought, said = self.splitter.feed(delta.text)
        if delta.finish is None:
            return thought, said
        last_thought, last_said = self.splitter.finish()
        return thought + last_thought, said + last_said

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def run_gen(
    run: Run,
    prompt: Prompt,
    node: Gen[Any],
    variable: Variable,
    thoughts: Variable | None = None,
) -> Outcome:
    """Make one call, whose sampling options are all in `node`. With `n` above 1 the value is the
    list of answers. What the model thinks is in the meta, and its text in the pieces of
    `thoughts`."""
    resolved = await prompt.resolve()
    variable.span.sending()
    call = Call(resolved, node.sampling, node.constraint, node.name, run.stream)
    # nothing is thought in a text all of which satisfies a constraint
    splits = node.marks and (node.constraint is None or isinstance(resolved, ChatPrompt))
    answers = [
        _Answer(Splitter(node.marks) if node.marks and splits else None)
        for _ in range(node.sampling.samples)
    ]
    usage = Usage()
    try:
        async with asyncio.timeout(run.timeout_s), aclosing(run.backend.generate(call)) as deltas:
            async for delta in deltas:
                if not 0 <= delta.index < len(answers):
                    raise BackendError(f"unasked answer {delta.index} of {len(answers)}")
                thought, said = answers[delta.index].add(delta)
                usage = delta.usage or usage
                if delta.text and delta.finish is None:  # not the whole answer at once
                    variable.span.piece()
                if said and len(answers) == 1:
                    variable.pieces.push(said)
                if thought and thoughts is not None and len(answers) == 1:
                    thoughts.pieces.push(thought)
    except TimeoutError as exc:
        raise _too_slow(run) from exc
    variable.span.count(usage)
    for i, answer in enumerate(answers):
        if not answer.finish:
            raise BackendError(f"answer {i} of {len(answers)} never ended")
        _check_complete(answer, node.constraint, node.sampling.max_tokens)
    meta = Meta(
        usage=usage,
        finish_reasons=tuple(answer.finish for answer in answers),
        matched=tuple(answer.matched for answer in answers),
        logprobs=tuple(tuple(answer.logprobs) for answer in answers),
        reasoning=tuple("".join(answer.thoughts) for answer in answers),
    )
    texts = [answer.text for answer in answers]
    values = texts if node.decode is None else [node.decode(text) for text in texts]
    return Outcome(values[0], meta, texts[0]) if len(texts) == 1 else Outcome(values, meta)


async def run_thoughts(variable: Variable) -> Outcome:
    """What the model thought before it said what `variable` is; of several answers a list."""
    reasoning = (await variable.wait()).meta.reasoning
    return Outcome.of_text(reasoning[0]) if len(reasoning) == 1 else Outcome(list(reasoning))


async def run_scope(events: Sequence[Event], variable: Variable) -> Outcome:
    """The text of `events`."""
    texts = []
    for i, event in enumerate(events):
        if isinstance(event, Variable):
            text = (await event.wait()).text or ""
        else:
            text = transcript(event, first=i == 0)
        variable.pieces.push(text)
        texts.append(text)
    return Outcome.of_text("".join(texts))


async def run_select(run: Run, prompt: Prompt, node: Select, variable: Variable) -> Outcome:
    """Score the choices and pick one; the value is the choice's text."""
    resolved = await prompt.resolve()
    choices = tuple(dict.fromkeys(node.choices))
    variable.span.sending()
    try:
        async with asyncio.timeout(run.timeout_s):
            selected = await select(run.backend, resolved, choices, node.method)
    except TimeoutError as exc:
        raise _too_slow(run) from exc
    choice = choices[selected.index]
    variable.span.scored_tokens = sum(len(score.tokens) for score in selected.scores)
    variable.pieces.push(choice)
    places = [choices.index(one) for one in node.choices]  # one may be there twice
    meta = Meta(
        usage=selected.usage,
        scores=tuple(selected.scores[i] for i in places) if selected.scores else (),
        values=tuple(selected.values[i] for i in places) if selected.values else (),
    )
    return Outcome.of_text(choice, meta)


async def run_gather(variables: Sequence[Variable]) -> Outcome:
    """The values of `variables` as a list; fails with the first failure in their order."""
    return Outcome([(await variable.wait()).value for variable in variables])


def _too_slow(run: Run) -> BackendUnavailable:
    return BackendUnavailable(f"no answer within timeout_s={run.timeout_s:g}")


def _check_complete(answer: _Answer, constraint: Constraint | None, limit: int | None) -> None:
    """An answer cut off by `max_tokens` must still satisfy its constraint."""
    if constraint is None or answer.finish != "length" or satisfied(constraint, answer.text):
        return
    raise Truncated(
        f"max_tokens={limit} ended the answer before its constraint was satisfied; "
        f"raise max_tokens. It reads {answer.text[-80:]!r} at its end"
    )
