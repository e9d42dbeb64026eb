"""A state on which a program's function runs without any value: what it appends and asks is written
down, to be sent whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from phloem.lang import ir
from phloem.lang.prompt import Begin, End, Prompt
from phloem.lang.recording.recorder import Lineage
from phloem.lang.run import Run
from phloem.lang.state import C, Record, State
from phloem.lang.unknown import Places, Unknown, filled, unknowns
from phloem.lang.variable import Outcome, Variable


@dataclass(frozen=True, slots=True)
class Called:
    """A call, which makes `variable`, and `thoughts` where those are wanted apart; `node` has all
    its options."""

    node: ir.Gen[Any] | ir.Select
    variable: Variable
    thoughts: Variable | None
    place: str


@dataclass(frozen=True, slots=True)
class Inserted:
    """A value is appended."""

    value: Unknown
    place: str


@dataclass(slots=True)
class Forked:
    """States begin here; `appended`: what they add is appended here, too."""

    states: Sequence[Recorded]
    place: str
    appended: bool = False


Entry = str | Begin | End | Called | Inserted | Forked


@dataclass(eq=False, slots=True)
class Recording:
    """What the states of one run know together: where its function does what, the calls, what was
    assigned that has unknown values in it, and whether any value has been read."""

    places: Places
    nodes: dict[Variable, ir.Gen[Any] | ir.Select] = field(default_factory=dict)
    assigned: dict[Variable, object] = field(default_factory=dict)
    read: bool = False


class Recorded(State):
    """`log` is what happened on this state since it began. Reading a variable gives an `Unknown`,
    or a list of them; what cannot be known yet raises `UsageError`."""

    def __init__(
        self,
        recording: Recording,
        run: Run,
        origin: Recorded | None = None,
        record: Record | None = None,
        lineage: Lineage = (0,),
    ) -> None:
        prompt, variables = (origin._prompt, origin._variables) if origin else (None, None)
        super().__init__(run, prompt, variables, record, lineage)
        self._recording = recording
        self.log: list[Entry] = []

    # ------------------------------------------------------------------ reading

    def __getitem__(self, key: ir.Key) -> Any:
        name = ir.name_of(key)
        return self._shown(self._variable(name), name)

    def __setitem__(self, name: str, value: object) -> None:
        if not any(True for _ in unknowns(value)):
            super().__setitem__(name, value)
            return
        variable = Variable(name)
        variable.parts = tuple(one.variable for one in unknowns(value))
        self._recording.assigned[variable] = value
        self._bind(name, variable)
        self._run.start(variable, partial(_fill, variable, value))

    def value(self, name: str, form: Any) -> NoReturn:
        self._refuse(f"value({name!r}, …) needs the value")

    def meta(self, name: str) -> NoReturn:
        self._refuse(f"meta({name!r}) is known at the end only")

    def text(self) -> NoReturn:
        self._refuse("text() needs all values")

    def messages(self) -> NoReturn:
        self._refuse("messages() needs all values")

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        self._refuse("text_iter() needs values")

    def text_async_iter(self, name: str | None = None, return_meta_data: bool = False) -> Any:
        self._refuse("text_async_iter() needs values")

    def fields_iter(self, name: str) -> Iterator[Any]:
        self._refuse("fields_iter() needs a value")

    def fields_async_iter(self, name: str) -> AsyncIterator[Any]:
        self._refuse("fields_async_iter() needs a value")

    def error(self) -> NoReturn:
        self._refuse("error() is known at the end only")

    def sync(self) -> None:
        """There is nothing to wait for yet."""

    # ------------------------------------------------------------------ inside

    def _append(self, node: ir.Node) -> None:
        if type(node) is not Unknown:
            super()._append(node)
            return
        self._check_text(node)
        self._prompt.check_place(f"variable {node.name!r}")
        self.log.append(Inserted(node, self._recording.places.here()))
        variable = node.variable
        if node.index is not None:  # one of several answers
            variable = Variable(node.name)
            variable.parts = (node.variable,)
            self._run.start(variable, partial(_fill, variable, node))
        super()._advance(self._prompt.with_variable(variable))

    def _check_text(self, value: Unknown) -> None:
        made = self._recording.nodes.get(value.variable)
        if made is None:
            self._refuse(f"s[{value.name!r}] is appended, which no call makes")
        if isinstance(made, ir.Gen) and made.decode is not None:
            self._refuse(f"s[{value.name!r}] is appended, which is an object and no text")

    def _asked(self, node: C, variable: Variable, thoughts: Variable | None = None) -> C:
        self._recording.nodes[variable] = node
        self.log.append(Called(node, variable, thoughts, self._recording.places.here()))
        if not isinstance(node, ir.Gen) or thoughts is None:
            return node
        self._recording.nodes[thoughts] = replace(node, decode=None)  # they are texts
        return replace(node, marks=None)  # the server tells the two apart

    def _advance(self, prompt: Prompt) -> None:
        events = prompt.events[len(self._prompt.events) :]
        self.log.extend(event for event in events if not isinstance(event, Variable))
        super()._advance(prompt)

    def _twin(self, lineage: Lineage) -> Recorded:
        return Recorded(self._recording, self._run, self, lineage=lineage)

    def _branch(self, size: int) -> list[State]:
        states = super()._branch(size)
        recorded = [state for state in states if isinstance(state, Recorded)]
        self.log.append(Forked(recorded, self._recording.places.here()))
        return states

    def _concatenate(self, states: Sequence[State], start: int) -> None:
        last = self.log[-1]
        if not isinstance(last, Forked) or list(last.states) != list(states):
            self._refuse('join("append") after the state itself has gone on')
        last.appended = True
        logged = len(self.log)
        super()._concatenate(states, start)
        del self.log[logged:]  # it is in the forks' own logs

    def _shown(self, variable: Variable, name: str) -> Any:
        if variable in self._recording.assigned:
            return self._recording.assigned[variable]
        if (known := variable.peek()) is not None:
            return known.value
        if variable.gathered:
            return [self._shown(one, f"{name}[{i}]") for i, one in enumerate(variable.parts)]
        self._recording.read = True
        places = self._recording.places
        node = self._recording.nodes.get(variable)
        answers = node.sampling.samples if isinstance(node, ir.Gen) else 1
        if answers == 1:
            return Unknown("variable", name, variable, None, places)
        return [Unknown("variable", f"{name}[{i}]", variable, i, places) for i in range(answers)]

    def _refuse(self, what: str) -> NoReturn:
        self._recording.places.refuse(what)


async def _fill(variable: Variable, value: object) -> Outcome:
    """What `variable` is: `value`, with the values in it."""
    for one in unknowns(value):
        await one.variable.wait()
    found = filled(value)
    if not isinstance(found, str):
        return Outcome(found)
    variable.pieces.push(found)
    return Outcome.of_text(found)
