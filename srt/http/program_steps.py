"""A straight-line program, checked before any of it runs: steps as they were sent → nodes.

What can be known without running is refused here, with the step's path: a step that is two things,
a name that is not known yet, text outside of messages, fields that no call has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from phloem.constrained.spec import Constraint, constraint_key
from phloem.srt.errors import PhloemError
from phloem.srt.http.body import BodyReader, invalid_at, validation_error
from phloem.srt.http.constraint_fields import read_constraint
from phloem.srt.http.openai_routes import chat_reader, completion_reader
from phloem.srt.http.program_answers import MARKS, AnswerMarks, reasoning_name
from phloem.srt.http.program_protocol import ProgramRequest, SelectFields, Step

MAX_STEPS: Final = 2048
MAX_CALLS: Final = 512
MAX_DEPTH: Final = 16
MAX_AHEAD: Final = 16
"""Constraints that are compiled while the first call runs."""

_KINDS: Final = ("text", "insert", "role", "gen", "select", "fork")
_OWN: Final = frozenset(
    {
        *("prompt", "messages", "suffix", "echo", "best_of", "tools", "tool_choice"),
        *("continue_final_message", "add_generation_prompt", "stream", "stream_options"),
        *("program", "plan", "rid", "request_id", "truncate_prompt_tokens"),
    }
)
"""Fields of a generation that the steps make, or that a step cannot have."""


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Insert:
    name: str
    separator: str


@dataclass(frozen=True)
class Role:
    role: str
    content: tuple[Node, ...]


@dataclass(frozen=True)
class Gen:
    """`fields` are those of a chat or of a completion, but for the prompt. With `marks` there is a
    variable of what is thought, too."""

    path: str
    name: str
    fields: dict[str, Any]
    marks: AnswerMarks | None = None


@dataclass(frozen=True)
class Select:
    path: str
    fields: SelectFields


@dataclass(frozen=True)
class Fork:
    """`names` are the variables that each branch makes."""

    path: str
    branches: tuple[tuple[Node, ...], ...]
    names: tuple[str, ...]
    append: bool


Node = Text | Insert | Role | Gen | Select | Fork


@dataclass(frozen=True)
class Program:
    """`constraints` are those of its calls, the first time that each occurs."""

    nodes: tuple[Node, ...]
    chat: bool
    calls: int
    constraints: tuple[Constraint, ...]


def read_program(request: ProgramRequest) -> Program:
    """The program that was sent. Raises `InvalidRequest` with the path of the step at fault."""
    for name, value in (request.variables or {}).items():
        if not _is_value(value):
            raise invalid_at("A variable is a text, or a list of values.", f"variables.{name}")
    chat = any(_has_role(request.steps))
    reader: BodyReader[Any] = chat_reader if chat else completion_reader
    checker = _Checker(chat, reader, request.defaults or {})
    nodes = checker.line(request.steps, "steps", set(request.variables or {}), None, 0)
    calls = sum(1 for node in walk(nodes) if isinstance(node, Gen | Select))
    if calls > MAX_CALLS:
        raise invalid_at(f"{calls} calls; at most {MAX_CALLS} are made.", "steps")
    return Program(nodes, chat, calls, tuple(checker.constraints.values())[:MAX_AHEAD])


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """All nodes, those inside others too."""
    for node in nodes:
        yield node
        if isinstance(node, Role):
            yield from walk(node.content)
        elif isinstance(node, Fork):
            for branch in node.branches:
                yield from walk(branch)


def calls_ahead(nodes: Sequence[Node], behind: int) -> int:
    """How many calls go on from where `nodes` begin; `behind` from where they end."""
    for node in nodes:
        match node:
            case Gen() | Select():
                return 1
            case Role():
                found = calls_ahead(node.content, 0)
            case Fork():
                found = sum(calls_ahead(branch, 0) for branch in node.branches)
            case _:
                found = 0
        if found:
            return found
    return behind


def _is_value(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_value, value))
    return isinstance(value, str)


def _has_role(steps: Sequence[Step]) -> Iterator[bool]:
    for step in steps:
        yield step.role is not None
        for branch in step.fork or ():
            yield from _has_role(branch)


@dataclass
class _Checker:
    chat: bool
    reader: BodyReader[Any]
    defaults: dict[str, Any]
    steps: int = 0
    constraints: dict[str, Constraint] = field(default_factory=dict)

    def line(
        self, steps: Sequence[Step], path: str, known: set[str], role: str | None, depth: int
    ) -> tuple[Node, ...]:
        """Nodes of steps that follow each other; `known` gets the names that they make."""
        if depth > MAX_DEPTH:
            raise invalid_at(f"Steps are nested more than {MAX_DEPTH} deep.", path)
        self.steps += len(steps)
        if self.steps > MAX_STEPS:
            raise invalid_at(f"More than {MAX_STEPS} steps.", "steps")
        return tuple(
            self._step(step, f"{path}[{i}]", known, role, depth) for i, step in enumerate(steps)
        )

    def _step(self, step: Step, at: str, known: set[str], role: str | None, depth: int) -> Node:
        kinds = [kind for kind in _KINDS if getattr(step, kind) is not None]
        if len(kinds) != 1:
            raise invalid_at(f"A step is one of {', '.join(_KINDS)}, not {len(kinds)}.", at)
        kind = kinds[0]
        for name, owner in (("content", "role"), ("join", "fork"), ("separator", "insert")):
            if getattr(step, name) is not None and kind != owner:
                raise invalid_at(f"It goes with {owner}.", f"{at}.{name}")
        if self.chat and role is None and kind not in ("role", "fork"):
            raise invalid_at("In a chat, it stands in the content of a role.", f"{at}.{kind}")
        if self.chat and role != "assistant" and kind in ("gen", "select"):
            raise invalid_at("Only the assistant's content is generated.", f"{at}.{kind}")
        match kind:
            case "text":
                return Text(step.text or "")
            case "insert":
                return self._insert(step, at, known)
            case "role":
                return self._role(step, at, known, role, depth)
            case "gen":
                return self._gen(step.gen or {}, f"{at}.gen", known)
            case "select":
                return self._select(step.select, f"{at}.select", known)
            case _:
                return self._fork(step, f"{at}.fork", known, role, depth)

    def _insert(self, step: Step, at: str, known: set[str]) -> Insert:
        name = step.insert or ""
        if name not in known:
            raise invalid_at(f"There is no variable {name!r} at this place.", f"{at}.insert")
        return Insert(name, "\n" if step.separator is None else step.separator)

    def _role(self, step: Step, at: str, known: set[str], role: str | None, depth: int) -> Role:
        if role is not None:
            raise invalid_at("A message has no message in it.", f"{at}.role")
        name, content = step.role or "", step.content
        if content is None:
            raise invalid_at("A message has content.", f"{at}.content")
        if isinstance(content, str):
            return Role(name, (Text(content),))
        return Role(name, self.line(content, f"{at}.content", known, name, depth + 1))

    def _gen(self, given: dict[str, Any], at: str, known: set[str]) -> Gen:
        name = given.get("name")
        if not isinstance(name, str) or not name:
            raise invalid_at("A variable has a name.", f"{at}.name")
        _add(name, at, known)
        fields = self.defaults | {key: value for key, value in given.items() if key != "name"}
        for key in fields:
            if key in _OWN:
                raise invalid_at("A step has no such field.", f"{at}.{key}")
        marks = _marks(fields.pop(MARKS, None), f"{at}.{MARKS}")
        if marks is not None:
            _add(reasoning_name(name), at, known)
        with under(at):
            body = self.reader.decode(msgspec.json.encode(fields | self._prompt()))
            found = read_constraint(body)
        if found is not None:
            constraint = found.for_engine()
            self.constraints.setdefault(constraint_key(constraint), constraint)
        return Gen(at, name, fields, marks)

    def _prompt(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": ""}]} if self.chat else {"prompt": ""}

    def _select(self, select: SelectFields | None, at: str, known: set[str]) -> Select:
        assert select is not None
        _add(select.name, at, known)
        return Select(at, select)

    def _fork(self, step: Step, at: str, known: set[str], role: str | None, depth: int) -> Fork:
        branches, made = [], []
        for i, steps in enumerate(step.fork or ()):
            inside = set(known)
            branches.append(self.line(steps, f"{at}[{i}]", inside, role, depth + 1))
            made.append(inside - known)
        names = set.intersection(*made)
        known |= names
        return Fork(at, tuple(branches), tuple(sorted(names)), step.join == "append")


@contextmanager
def under(path: str) -> Iterator[None]:
    """Errors inside are reported below `path`; those of a prompt, which steps make, as its own."""
    try:
        yield
    except PhloemError as error:
        inner = "" if error.param in (None, "prompt", "messages") else f".{error.param}"
        info = msgspec.structs.replace(error.to_info(), param=path + inner)
        raise PhloemError.from_info(info) from error


def _marks(given: object, at: str) -> AnswerMarks | None:
    try:
        return msgspec.convert(given, AnswerMarks | None)
    except msgspec.ValidationError as error:
        raise validation_error(error, at) from None


def _add(name: str, at: str, known: set[str]) -> None:
    if name in known:
        raise invalid_at(f"There is a variable {name!r} already.", f"{at}.name")
    known.add(name)
