"""What was written down of a program → the steps of `POST /programs/run`.

Names there are unique where the program's need not be: a name that is bound again, or a call
without one, gets a name of its own; the variables keep theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, NoReturn

from phloem.lang import ir
from phloem.lang.backend import wire
from phloem.lang.backend.dialects import DIALECTS, sampling_fields
from phloem.lang.backend.http_transport import Body
from phloem.lang.errors import RequestRefused
from phloem.lang.prompt import Begin, End
from phloem.lang.reasoning import Marks
from phloem.lang.recorded import Called, Entry, Forked, Inserted
from phloem.lang.unknown import Places
from phloem.lang.variable import Variable

_PHLOEM: Final = DIALECTS["phloem"]
_MAX_NAME: Final = 100
_THOUGHTS: Final = "_reasoning_content"  # behind the name of what is said then

Value = tuple[Variable, int | None]
"""A variable, or one of several answers."""


@dataclass(slots=True)
class _Line:
    """What a line of steps knows: names that are taken, variables by name, and the lists there are
    of several answers, and of what all branches of a fork define."""

    taken: set[str] = field(default_factory=set)
    names: dict[Variable, str] = field(default_factory=dict)
    lists: dict[tuple[Value, ...], str] = field(default_factory=dict)

    def make(self, variable: Variable, name: str, answers: int) -> None:
        """`variable` is there by that name."""
        self.taken.add(name)
        if answers > 1:
            self.lists[tuple((variable, i) for i in range(answers))] = name
        else:
            self.names[variable] = name

    def branch(self) -> _Line:
        return _Line(set(self.taken), dict(self.names), dict(self.lists))


@dataclass(slots=True)
class Steps:
    """Writes steps. `calls` are the variables that they make, by the step's path."""

    places: Places
    calls: dict[str, Variable] = field(default_factory=dict)
    _chat: bool = field(default=False, init=False)

    def whole(self, log: Sequence[Entry]) -> list[Body]:
        """Of a program's own state. Raises `UsageError` where a step cannot say it."""
        self._chat = _has(Begin, log)
        return self._line(log, "steps", _Line())

    def _line(self, log: Sequence[Entry], path: str, line: _Line) -> list[Body]:
        steps: list[Body] = []
        entries = _joined(log)
        at = 0
        while at < len(entries):
            here = f"{path}[{len(steps)}]"
            entry, used = entries[at], 1
            match entry:
                case str():
                    steps.append({"text": entry})
                case Begin(role):
                    content = _until_end(entries[at + 1 :])
                    used = len(content) + 2
                    steps.append(
                        {"role": role, "content": self._line(content, f"{here}.content", line)}
                    )
                case End():
                    self.places.refuse("a fork closes a message that was open before it")
                case Called():
                    steps.append(self._call(entry, here, line))
                case Inserted():
                    step, used = self._insert(entries[at:], entry, line)
                    steps.append(step)
                case Forked():
                    steps.extend(self._fork(entry, f"{here}.fork", line))
            at += used
        return steps

    # ------------------------------------------------------------------ calls

    def _call(self, entry: Called, path: str, line: _Line) -> Body:
        node, variable = entry.node, entry.variable
        marks = self._marks(entry)
        name = _free(node.name or "unnamed", line.taken, _THOUGHTS if marks else "")
        answers = node.sampling.samples if isinstance(node, ir.Gen) else 1
        line.make(variable, name, answers)
        if entry.thoughts is not None and marks is not None:
            line.make(entry.thoughts, name + _THOUGHTS, answers)
        self.calls[path] = variable
        if isinstance(node, ir.Select):
            choices = list(dict.fromkeys(node.choices))
            normalization = wire.NORMALIZATION[node.method]
            return {"select": {"name": name, "choices": choices, "normalization": normalization}}
        try:
            fields = sampling_fields(node.sampling, _PHLOEM.options, _PHLOEM.title)
            fields |= _PHLOEM.constrained(node.constraint, chat=self._chat)
        except RequestRefused as exc:
            self.places.refuse(exc.message, entry.place)
        fields |= _PHLOEM.logprobs(node.sampling, chat=self._chat)
        if marks is not None:
            fields["reasoning_marks"] = asdict(marks)
        return {"gen": {"name": name, "max_tokens": node.sampling.max_tokens, **fields}}

    def _marks(self, entry: Called) -> Marks | None:
        """Those by which the server is to tell thoughts apart."""
        node = entry.node
        if entry.thoughts is None or not isinstance(node, ir.Gen):
            return None
        # nothing is thought in a text all of which satisfies a constraint
        return node.marks if node.constraint is None or self._chat else None

    # ------------------------------------------------------------------ values

    def _insert(self, rest: Sequence[Entry], entry: Inserted, line: _Line) -> tuple[Body, int]:
        """The step, and how many entries it is of: a list is inserted whole, with one separator."""
        value = _value(entry)
        if value[0] in line.names:
            return {"insert": line.names[value[0]]}, 1
        for values, name in line.lists.items():
            if values[0] == value:
                return self._list(rest, entry, values, name)
        self._cannot_insert(entry)

    def _list(
        self, rest: Sequence[Entry], entry: Inserted, values: tuple[Value, ...], name: str
    ) -> tuple[Body, int]:
        if len(values) == 1:
            return {"insert": name}, 1
        separator = rest[1] if len(rest) > 1 and isinstance(rest[1], str) else ""
        apart = 2 if separator else 1
        used = apart * (len(values) - 1) + 1
        found = [_value(one) for one in rest[:used:apart] if isinstance(one, Inserted)]
        between = {one for one in rest[1:used:2] if isinstance(one, str)} if separator else set()
        if tuple(found) != values or len(between) > 1:
            self._cannot_insert(entry)
        return {"insert": name, "separator": separator}, used

    def _cannot_insert(self, entry: Inserted) -> NoReturn:
        self.places.refuse(
            f"s[{entry.value.name!r}] cannot be appended here: of several answers or forks all "
            "are, in order, with one text between them; a fork knows what was there when it began",
            entry.place,
        )

    # ------------------------------------------------------------------ forks

    def _fork(self, entry: Forked, path: str, line: _Line) -> list[Body]:
        if not entry.appended and not any(_has(Called, state.log) for state in entry.states):
            return []  # whatever was said there, nobody asks about it
        branches, lines = [], []
        for i, state in enumerate(entry.states):
            inside = line.branch()
            branches.append(self._line(state.log, f"{path}[{i}]", inside))
            lines.append(inside)
        common = set.intersection(*(one.taken for one in lines)) - line.taken
        line.taken |= common
        for name in common:
            made = [{known: v for v, known in one.names.items()}.get(name) for one in lines]
            variables = [variable for variable in made if variable is not None]
            if len(variables) == len(lines):
                line.lists[tuple((variable, None) for variable in variables)] = name
        return [{"fork": branches, "join": "append"} if entry.appended else {"fork": branches}]


def _value(entry: Inserted) -> Value:
    return entry.value.variable, entry.value.index


def _joined(log: Sequence[Entry]) -> list[Entry]:
    """`log`, in which texts that follow each other are one."""
    entries: list[Entry] = []
    for entry in log:
        last = entries[-1] if entries else None
        if isinstance(entry, str) and isinstance(last, str):
            entries[-1] = last + entry
        else:
            entries.append(entry)
    return entries


def _until_end(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The content of a message that has begun; one that stays open has all that follows."""
    end = next((i for i, entry in enumerate(entries) if isinstance(entry, End)), len(entries))
    return entries[:end]


def _has(kind: type[Entry], log: Sequence[Entry]) -> bool:
    """Whether an entry of that kind is in it, forks included."""
    return any(
        isinstance(entry, kind)
        or (isinstance(entry, Forked) and any(_has(kind, state.log) for state in entry.states))
        for entry in log
    )


def _free(base: str, taken: set[str], beside: str) -> str:
    """A name for `base` that is not taken, nor is the one with `beside` behind it."""
    base = base[:_MAX_NAME]
    names = itertools.chain([base], (f"{base} ({number})" for number in itertools.count(2)))
    return next(name for name in names if taken.isdisjoint((name, name + beside)))
