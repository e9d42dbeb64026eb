"""What `gen`, `select` and `join` do on the event loop: prompt in, outcome out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from phloem.constrained.spec import Constraint, Continued, JsonObject, JsonSchema, Regex
from phloem.lang.backend.base import Call, Delta, TextPrompt, TokenLogprob, Usage
from phloem.lang.choices import ChoicesMethod, decide
from phloem.lang.errors import BackendError, BackendUnavailable, Truncated
from phloem.lang.ir import Gen, Select
from phloem.lang.prompt import Prompt
from phloem.lang.run import Run
from phloem.lang.sampling import DEFAULT_MAX_TOKENS, Sampling
from phloem.lang.variable import Meta, Outcome, Variable

# What "without the prompt" means: a sequence's first token has no logprob, so a bare line end
# stands before the choice.
_NO_PROMPT = TextPrompt("\n")


@dataclass(slots=True)
class _Answer:
    """One of the `n` answers while it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    matched: str | int | None = None

    def add(self, delta: Delta) -> None:
        if self.finish and (delta.text or delta.finish):
            raise BackendError(f"answer {delta.index} goes on after its end")
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.matched = delta.finish, delta.matched

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def run_gen(run: Run, prompt: Prompt, node: Gen, variable: Variable) -> Outcome:
    """Make one call. With `n` above 1 the value is the list of answers."""
    resolved = await prompt.resolve()
    defaults = run.sampling.over(Sampling(max_tokens=DEFAULT_MAX_TOKENS))
    sampling = node.sampling.over(defaults)
    call = Call(resolved, sampling, node.constraint, node.name, run.stream)
    answers = [_Answer() for _ in range(sampling.samples)]
    usage = Usage()
    try:
        async with asyncio.timeout(run.timeout_s), aclosing(run.backend.generate(call)) as deltas:
            async for delta in deltas:
                if not 0 <= delta.index < len(answers):
                    raise BackendError(f"unasked answer {delta.index} of {len(answers)}")
                answers[delta.index].add(delta)
                usage = delta.usage or usage
                if delta.text and len(answers) == 1:
                    variable.pieces.push(delta.text)
    except TimeoutError as exc:
        raise _too_slow(run) from exc
    for i, answer in enumerate(answers):
        if not answer.finish:
            raise BackendError(f"answer {i} of {len(answers)} never ended")
        _check_complete(answer, node.constraint, sampling.max_tokens)
    meta = Meta(
        usage=usage,
        finish_reasons=tuple(answer.finish for answer in answers),
        matched=tuple(answer.matched for answer in answers),
        logprobs=tuple(tuple(answer.logprobs) for answer in answers),
    )
    texts = [answer.text for answer in answers]
    return Outcome(texts[0] if sampling.n is None or sampling.n == 1 else texts, meta)


async def run_select(run: Run, prompt: Prompt, node: Select, variable: Variable) -> Outcome:
    """Score the choices and pick one; the value is the choice's text."""
    resolved = await prompt.resolve()
    try:
        async with asyncio.timeout(run.timeout_s):
            scores = await run.backend.score(resolved, node.choices)
            unconditional = None
            if node.method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
                unconditional = await run.backend.score(_NO_PROMPT, node.choices)
    except TimeoutError as exc:
        raise _too_slow(run) from exc
    if len(scores) != len(node.choices):
        raise BackendError(f"{len(scores)} scores for {len(node.choices)} choices")
    decision = decide(node.method, scores, unconditional)
    choice = node.choices[decision.index]
    variable.pieces.push(choice)
    return Outcome(choice, Meta(scores=tuple(scores), values=decision.values))


async def run_gather(variables: Sequence[Variable]) -> Outcome:
    """The values of `variables` as a list; fails with the first failure in their order."""
    return Outcome([(await variable.wait()).value for variable in variables])


def _too_slow(run: Run) -> BackendUnavailable:
    return BackendUnavailable(f"no answer within timeout_s={run.timeout_s:g}")


def _check_complete(answer: _Answer, constraint: Constraint | None, limit: int | None) -> None:
    """An answer cut off by `max_tokens` must still satisfy its constraint."""
    if constraint is None or answer.finish != "length" or _satisfied(constraint, answer.text):
        return
    raise Truncated(
        f"max_tokens={limit} ended the answer before its constraint was satisfied; "
        f"raise max_tokens. It reads {answer.text[-80:]!r} at its end"
    )


def _satisfied(constraint: Constraint, text: str) -> bool:
    match constraint:
        case JsonSchema() | JsonObject():
            try:
                json.loads(text)
            except ValueError:
                return False
            return True
        case Continued(constraint=inner, prefix=prefix):
            return _satisfied(inner, prefix + text)
        case Regex(pattern=pattern):
            return _full_match(pattern, text)
        case _:
            return False


def _full_match(pattern: str, text: str) -> bool:
    """`re.fullmatch` in linear time: Python's own engine could hang the loop on some patterns."""
    import jsonschema_rs  # only truncated answers need it

    try:
        validator = jsonschema_rs.validator_for(
            {"type": "string", "pattern": f"^(?:{pattern})$"},
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except jsonschema_rs.ValidationError:  # look-around and the like: cannot be shown complete
        return False
    return bool(validator.is_valid(text))
