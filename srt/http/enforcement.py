"""Constraints of a request around its generation: what is enforced, and what became of it.

With `strict: false` a schema that is refused for a keyword is sent again without it, until it is
taken: whether it can be enforced is the grammar process's to say, under its own limits, and here
only JSON is cut. The answer says what was left out.

Finished JSON is put to a validator that shares nothing with the grammar engine. A strict answer
that it refuses is an error, never a reply.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Final, Literal, NoReturn

import msgspec
from msgspec import UNSET, Raw

from phloem.constrained.base import ConstraintError
from phloem.constrained.json_events import JsonEvents
from phloem.constrained.relax import RelaxedSchema
from phloem.constrained.spec import (
    Constraint,
    JsonLines,
    JsonObject,
    JsonSchema,
    WithSchema,
)
from phloem.constrained.validate import validator_of
from phloem.srt.errors import InternalError, InvalidConstraint
from phloem.srt.generation import Chunk, ConstraintOutcome, FieldValue, Finish, GenerateRequest
from phloem.srt.http.context import Serving
from phloem.srt.http.fanout import Event, generate, part_rid
from phloem.srt.http.found_constraint import FoundConstraint, PreludeSkipper
from phloem.srt.http.relaxations import Relaxation
from phloem.srt.http.verdict import UNKNOWN, Verdict, annotated, judge
from phloem.srt.messages import FinishReason

MAX_RELAXATIONS: Final = 32
"""Keywords that are taken out of one schema; a schema that needs more is refused."""

INLINE_TEXT: Final = 32_768
"""Longer answers are validated in a thread."""

MAX_LIMITS: Final = 4
"""Of these, at most so many that are too large, not unknown: each may take long to refuse."""

_CUT: Final = frozenset({"unsupported_keyword", "unsupported_regex"})

logger = logging.getLogger(__name__)


@asynccontextmanager
async def generate_constrained(
    serving: Serving,
    rid: str,
    requests: Sequence[GenerateRequest],
    constraints: Sequence[FoundConstraint | None],
    *,
    fields: bool = False,
) -> AsyncIterator[AsyncIterator[Event]]:
    """`generate`, with one constraint (or none) a request. The last chunk of a constrained answer
    says what became of it; with `fields`, chunks tell the values that they complete.

    Raises besides what `generate` raises: `InvalidConstraint` for a constraint that is refused,
    and `InternalError` for an answer that breaks a strict one.
    """
    plans = {found: _Plan(serving, found) for found in constraints if found is not None}
    following = [None if found is None else plans[found] for found in constraints]
    async with AsyncExitStack() as stack:
        for attempts in itertools.count():
            attempt = [
                request
                if plan is None
                else msgspec.structs.replace(
                    request, constraint=plan.constraint, rid=_part(request, rid, i, attempts)
                )
                for i, (request, plan) in enumerate(zip(requests, following, strict=True))
            ]
            try:
                events = await stack.enter_async_context(generate(serving, rid, attempt))
            except InvalidConstraint as error:
                if len(plans) != 1 or not await next(iter(plans.values())).relax(error):
                    raise
            else:
                break
        for plan in plans.values():
            plan.remember()
        answers = [
            None if plan is None else _Answer(serving, plan, request, fields=fields)
            for request, plan in zip(requests, following, strict=True)
        ]
        yield await stack.enter_async_context(aclosing(_followed(events, answers)))


def _part(request: GenerateRequest, rid: str, index: int, attempts: int) -> str | None:
    """The id of one of several sequences in an attempt after the first: of its own, since a
    refusal of the attempt before may still be on its way."""
    if attempts == 0:
        return request.rid
    return f"{request.rid or part_rid(rid, index, 2)}.{attempts}"


async def _followed(
    events: AsyncIterator[Event], answers: Sequence[_Answer | None]
) -> AsyncGenerator[Event, None]:
    async for index, chunk in events:
        answer = answers[index]
        yield index, chunk if answer is None else await answer.follow(chunk)


class _Plan:
    """One constraint of a request, and the schema that is enforced in its place."""

    def __init__(self, serving: Serving, found: FoundConstraint) -> None:
        self.found = found
        self._known = serving.relaxations
        self._cut: RelaxedSchema | None = None
        self._cuts = 0
        self._limits = 0
        self.relaxation: Relaxation | None = None
        if not found.strict and isinstance(found.constraint, WithSchema):
            self.relaxation = self._known.get(found.constraint.schema)

    @property
    def constraint(self) -> Constraint:
        schema = None if self.relaxation is None else self.relaxation.enforced_schema
        return self.found.for_engine(schema)

    async def relax(self, error: InvalidConstraint) -> bool:
        """Cut out what was refused; False when it is not to be cut."""
        constraint = self.found.constraint
        pointer = error.param or ""
        too_large = error.code == "limit_exceeded" and pointer != ""
        if (
            self.found.strict
            or (pointer and not pointer.startswith("/"))
            or not (error.code in _CUT or too_large)
            or not isinstance(constraint, WithSchema)
            or self._cuts == MAX_RELAXATIONS
            or (too_large and self._limits == MAX_LIMITS)
        ):
            return False
        self._cuts += 1
        self._limits += too_large
        relaxation = await asyncio.to_thread(self._without, constraint.schema, pointer)
        if relaxation is None:
            return False
        self.relaxation = relaxation
        return True

    def remember(self) -> None:
        """The engine took it: the next request with this schema need not find out."""
        if self._cut is not None and self.relaxation is not None:
            assert isinstance(self.found.constraint, WithSchema)
            self._known.put(self.found.constraint.schema, self.relaxation)

    def _without(self, schema: str, pointer: str) -> Relaxation | None:
        try:
            if self._cut is None:
                self._cut = RelaxedSchema(schema)
            if not self._cut.drop(pointer):
                return None
            checked = self._cut.checked_schema()
            validator_of(checked)
        except ConstraintError:  # then nothing could be said of the answer
            return None
        return Relaxation(
            enforced_schema=self._cut.text,
            checked_schema=checked,
            enforced=self._cut.enforced(),
            validated=self._cut.validated(),
            unsupported=self._cut.unsupported(),
        )


class _Answer:
    """One answer as it grows, and the verdict at its end."""

    def __init__(
        self, serving: Serving, plan: _Plan, request: GenerateRequest, *, fields: bool
    ) -> None:
        self._metrics = serving.metrics
        self._plan = plan
        self._request = request
        self._texts: list[str] = []
        self._fields = _Fields(plan.found) if fields else None

    async def follow(self, chunk: Chunk) -> Chunk:
        """The chunk with what is to be said of the constraint."""
        self._texts.append(chunk.text)
        ended = chunk.finish is not None and self._is_end(chunk.finish)
        fields = [] if self._fields is None else self._fields.feed(chunk.text, ended)
        outcome = None if chunk.finish is None else await self._outcome(chunk, ended)
        if not fields and outcome is None:
            return chunk
        return msgspec.structs.replace(chunk, fields=fields, constraint=outcome)

    def _is_end(self, finish: Finish) -> bool:
        """Whether the text ended because the grammar said it may: not cut, and not stopped."""
        return (
            finish.reason is FinishReason.STOP
            and not isinstance(finish.matched, str)
            and finish.matched not in self._request.sampling.stop_token_ids
        )

    async def _outcome(self, chunk: Chunk, ended: bool) -> ConstraintOutcome:
        found, cut = self._plan.found, self._plan.relaxation
        verdict = await self._verdict()
        enforcement: Literal["full", "partial"] = "full" if cut is None else "partial"
        if ended and verdict.valid is False:
            self._metrics.constraint_violations.labels(enforcement).inc()
            if cut is None:
                _refuse(found, verdict)
        outcome = ConstraintOutcome(
            kind=found.kind,
            enforcement=enforcement,
            complete=ended or verdict.valid is True,
            valid=verdict.valid if ended or verdict.valid else None,
            closed_by_budget=chunk.closed_by_budget,
        )
        unsupported = annotated(found.constraint)
        if cut is None:
            return msgspec.structs.replace(outcome, unsupported=unsupported or UNSET)
        return msgspec.structs.replace(
            outcome,
            enforced=[path for path in cut.enforced if path not in unsupported],
            validated=cut.validated,
            unsupported=list(dict.fromkeys([*cut.unsupported, *unsupported])),
        )

    async def _verdict(self) -> Verdict:
        request, found = self._request, self._plan.found
        if request.include_stop and not request.skip_special_tokens:
            return UNKNOWN  # the end token's own text may be in it
        text = found.constrained_part("".join(self._texts))
        if text is None:
            return UNKNOWN
        constraint, cut = found.constraint, self._plan.relaxation
        if cut is not None and isinstance(constraint, WithSchema):
            constraint = msgspec.structs.replace(constraint, schema=cut.checked_schema)
        if len(text) <= INLINE_TEXT:
            return judge(constraint, text)
        return await asyncio.to_thread(judge, constraint, text)


class _Fields:
    """The values of a JSON answer, as they are completed; those of the prefix come first."""

    def __init__(self, found: FoundConstraint) -> None:
        lines = isinstance(found.constraint, JsonLines)
        self._events: JsonEvents | None = JsonEvents(lines=lines)
        self._prelude = None if found.after is None else PreludeSkipper(found.after)
        self._prefix = found.prefix

    def feed(self, text: str, ended: bool) -> list[FieldValue]:
        text, self._prefix = self._prefix + text, ""
        if self._prelude is not None:
            text = self._prelude.feed(text)
            if not self._prelude.over:
                return []
        if self._events is None:
            return []
        try:
            found = self._events.feed(text)
            if ended:
                found += self._events.finish()
        except ValueError:  # the verdict will say so
            self._events = None
            return []
        return [FieldValue(field.path, Raw(field.raw.encode())) for field in found]


def is_json(found: FoundConstraint) -> bool:
    """Whether answers are JSON, of which fields can be told."""
    return isinstance(found.constraint, JsonSchema | JsonObject | JsonLines)


def _refuse(found: FoundConstraint, verdict: Verdict) -> NoReturn:
    logger.error("An answer breaks its constraint (%s): %s", found.param, verdict.reason)
    raise InternalError(
        f"The answer breaks its constraint, which must not happen: {verdict.reason}.",
        param=found.param,
        code="constraint_violated",
    )
