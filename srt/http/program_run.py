"""Runs a straight-line program: its calls as their routes would make them, without round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from phloem.constrained.spec import Constraint
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import Serving
from phloem.srt.http.openai_calls import chat_call, completion_call
from phloem.srt.http.openai_routes import chat_reader, completion_reader
from phloem.srt.http.program_answers import answer_event, reasoning_name
from phloem.srt.http.program_protocol import StoredMessage, Value, VariableEvent
from phloem.srt.http.program_steps import (
    Fork,
    Gen,
    Insert,
    Node,
    Program,
    Role,
    Select,
    Text,
    calls_ahead,
    under,
)
from phloem.srt.http.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from phloem.srt.http.responding import whole
from phloem.srt.http.scoring_routes import score_choices, score_reader
from phloem.srt.messages import CallPlan


@dataclass(frozen=True)
class Line:
    """How far one line of a program is: whole messages, the text of the one that is open (or of a
    program that is no chat), and the variables that it knows."""

    variables: dict[str, Value]
    messages: tuple[StoredMessage, ...] = ()
    text: str = ""

    def saying(self, text: str) -> Line:
        return replace(self, text=self.text + text)

    def knowing(self, name: str, value: Value) -> Line:
        return replace(self, variables=self.variables | {name: value})


@dataclass
class _Place:
    """Where a line runs: `group` and `width` are for the first call of a branch, and `behind` is
    the number of calls that go on from the line's end."""

    group: str = ""
    width: int = 0
    behind: int = 0

    def take(self) -> tuple[str, int]:
        group, self.group = self.group, ""
        return group, self.width


@dataclass
class ProgramRun:
    """One run. `shared` are fields of all calls; `told` is awaited with each variable. With `ends`
    the scheduler is told how many calls remain; else the client goes on with its program."""

    program: Program
    ctx: Serving
    caller: Caller
    rid: str
    shared: dict[str, Any]
    told: Callable[[VariableEvent], Awaitable[None]]
    ends: bool
    usages: list[Usage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = self.program.calls
        self._ahead: tuple[Constraint, ...] = self.program.constraints

    async def run(self, variables: dict[str, Value]) -> Line:
        """All of it. Raises `PhloemError` under the path of the step that failed; then, and when
        this is cancelled, nothing of it runs any more."""
        return await self._line(self.program.nodes, Line(variables), _Place())

    @property
    def usage(self) -> Usage:
        """Of all calls so far."""
        return _usage(
            sum(one.prompt_tokens for one in self.usages),
            sum(one.prompt_tokens_details.cached_tokens for one in self.usages),
            sum(one.completion_tokens for one in self.usages),
            sum(one.completion_tokens_details.forced_tokens for one in self.usages),
            sum(one.completion_tokens_details.reasoning_tokens for one in self.usages),
            sum(one.completion_tokens_details.accepted_prediction_tokens for one in self.usages),
            sum(one.completion_tokens_details.rejected_prediction_tokens for one in self.usages),
        )

    async def _line(self, nodes: Sequence[Node], line: Line, place: _Place) -> Line:
        for i, node in enumerate(nodes):
            match node:
                case Text(text):
                    line = line.saying(text)
                case Insert(name, separator):
                    line = line.saying(_joined(line.variables[name], separator))
                case Role():
                    line = await self._role(node, line, place, nodes[i + 1 :])
                case Gen() | Select():
                    goes_on = calls_ahead(nodes[i + 1 :], place.behind)
                    with under(node.path):
                        line = await self._call(node, line, self._plan(place, goes_on))
                case Fork():
                    line = await self._fork(node, line)
        return line

    async def _role(self, node: Role, line: Line, place: _Place, rest: Sequence[Node]) -> Line:
        before = line
        inner = replace(place, behind=calls_ahead(rest, place.behind))
        line = await self._line(node.content, replace(before, text=""), inner)
        place.group = inner.group
        message = StoredMessage(node.role, line.text)
        return replace(line, messages=(*line.messages, message), text="")

    async def _fork(self, node: Fork, line: Line) -> Line:
        width = sum(calls_ahead(branch, 0) > 0 for branch in node.branches)
        group = node.path if width > 1 else ""
        lines = await _all(
            [
                self._line(branch, line, _Place(group, width if group else 0))
                for branch in node.branches
            ]
        )
        for name in node.names:
            line = line.knowing(name, [one.variables[name] for one in lines])
        if node.append:
            said, read = len(line.messages), len(line.text)
            messages = [message for one in lines for message in one.messages[said:]]
            text = "".join(one.text[read:] for one in lines)
            line = replace(line, messages=(*line.messages, *messages), text=line.text + text)
        return line

    # ------------------------------------------------------------------ calls

    def _plan(self, place: _Place, goes_on: int) -> CallPlan:
        self._left -= 1
        group, width = place.take()
        constraints, self._ahead = self._ahead, ()
        return CallPlan(
            remaining=self._left if self.ends else None,
            fork=goes_on,
            group=group,
            width=width if group else 0,
            next_constraints=list(constraints),
        )

    async def _call(self, node: Gen | Select, line: Line, plan: CallPlan) -> Line:
        number = self.program.calls - self._left
        body = self.shared | {"rid": f"{self.rid}-{number}"}
        body |= self._prompt(line)
        if isinstance(node, Select):
            return await self._select(node, line, body, replace(self.caller, plan=_unforked(plan)))
        return await self._gen(node, line, node.fields | body, replace(self.caller, plan=plan))

    def _prompt(self, line: Line) -> dict[str, Any]:
        if not self.program.chat:
            return {"prompt": line.text}
        messages = list(line.messages)
        if not line.text:
            return {"messages": messages}
        messages.append(StoredMessage("assistant", line.text))
        return {"messages": messages, "continue_final_message": True}

    async def _gen(self, node: Gen, line: Line, body: dict[str, Any], caller: Caller) -> Line:
        data = msgspec.json.encode(body)
        if self.program.chat:
            chat, unknown = chat_reader.decode_noting(data)
            call, answer = await chat_call(chat, self.ctx, caller, unknown=unknown)
        else:
            completion, unknown = completion_reader.decode_noting(data)
            call, answer = await completion_call(completion, self.ctx, caller, unknown=unknown)
        reply = await whole(self.ctx, call, answer)
        many = (body.get("n") or 1) != 1
        path = node.path.removesuffix(".gen")
        event = answer_event(reply, path, node.name, node.marks, many=many)
        line = await self._tell(event, line)
        if node.marks is not None:
            nothing = [""] * len(event.value) if many else ""
            line = line.knowing(reasoning_name(node.name), event.reasoning_content or nothing)
        return line if isinstance(event.value, list) else line.saying(event.value)

    async def _select(self, node: Select, line: Line, body: dict[str, Any], caller: Caller) -> Line:
        fields = node.fields
        wanted = {"choices": fields.choices, "normalization": fields.normalization}
        request = score_reader.decode(msgspec.json.encode(body | wanted))
        scores = await score_choices(request, self.ctx, caller)
        event = VariableEvent(
            path=node.path.removesuffix(".select"),
            name=fields.name,
            value=scores.choice,
            scores=scores.choices,
            usage=_usage(
                scores.usage.prompt_tokens, scores.usage.prompt_tokens_details.cached_tokens
            ),
        )
        return (await self._tell(event, line)).saying(scores.choice)

    async def _tell(self, event: VariableEvent, line: Line) -> Line:
        self.usages.append(event.usage)
        await self.told(event)
        return line.knowing(event.name, event.value)


def _unforked(plan: CallPlan) -> CallPlan:
    """A score has no answer to go on from: what follows goes on from its prompt."""
    return msgspec.structs.replace(plan, fork=0)


def _joined(value: Value, separator: str) -> str:
    if isinstance(value, str):
        return value
    return separator.join(_joined(one, separator) for one in value)


def _usage(prompt: int, cached: int, completion: int = 0, *details: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(*details or (0,)),
    )


async def _all(lines: Sequence[Coroutine[Any, Any, Line]]) -> list[Line]:
    """Run branches at once; the first that fails ends the others."""
    tasks = [asyncio.create_task(one) for one in lines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
