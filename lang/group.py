"""The states of a fork, and how their work comes back together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from phloem.lang import ir
from phloem.lang.errors import UsageError
from phloem.lang.variable import Variable

if TYPE_CHECKING:
    from phloem.lang.state import State

T = TypeVar("T")

JoinMode = Literal["gather", "append", "gather_variable", "concate_and_append"]
"""How `Group.join` brings forks together; the last two are SGLang's names of the first two."""


class Group:
    """The states of one fork, in order."""

    def __init__(self, parent: State, states: Sequence[State]) -> None:
        self._parent = parent
        self._states = tuple(states)
        self._start = len(parent._prompt.events)
        self._inherited = frozenset(parent._variables.values())

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    @overload
    def __getitem__(self, key: int) -> State: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: ir.Gen[T]) -> list[T]: ...
    @overload
    def __getitem__(self, key: ir.Select) -> list[str]: ...
    def __getitem__(self, key: int | ir.Key) -> State | list[Any]:
        """`group[i]` is a state; `group["x"]` the list of the states' values of `x` (waits)."""
        if isinstance(key, int):
            return self._states[key]
        return [state[ir.name_of(key)] for state in self._states]

    def __setitem__(self, key: int, value: State) -> None:
        """Only what `group[i] += …` does: put the same state back."""
        if self._states[key] is not value:
            raise TypeError("the states of a group cannot be replaced")

    def __iadd__(
        self, value: ir.Content | Sequence[ir.Content] | Callable[[int], ir.Content]
    ) -> Self:
        """Append to every state: the same, one of a list each, or what a function of its index
        gives."""
        contents: Sequence[ir.Content]
        if callable(value):
            contents = [value(i) for i in range(len(self))]
        elif isinstance(value, list | tuple):
            contents = value
        else:
            contents = [value] * len(self)  # type: ignore[list-item]
        if len(contents) != len(self):
            raise UsageError(f"{len(contents)} things to append to {len(self)} forks")
        for state, content in zip(self._states, contents, strict=True):
            state += content
        return self

    def join(self, mode: JoinMode = "gather") -> None:
        """Bring the forks' work back into the state they came from, and close them.

        "gather": each variable that forks have defined becomes, there, the list of its values in
        those that have; one that the state has defined itself stays. "append": the text that each
        fork added is appended there, in order. Does not wait: whoever reads, or generates from it,
        does. A failed fork fails what is built on it. The two other names are SGLang's.

        Raises `ValueError` for another mode, `UsageError` when the forks are joined already.
        """
        if mode not in ("gather", "append", "gather_variable", "concate_and_append"):
            raise ValueError(f"join mode must be 'gather' or 'append', not {mode!r}")
        self._parent._check_open()
        for state in self._states:
            state._check_open()
        if mode in ("append", "concate_and_append"):
            self._parent._concatenate(self._states, self._start)
        else:
            for name, variables in self._defined().items():
                self._parent._gather(name, variables)
        for state in self._states:
            state._closed = "it was joined"

    def _defined(self) -> dict[str, list[Variable]]:
        """The forks' own variables, by name, but for names of the parent's own."""
        found: dict[str, list[Variable]] = {}
        there = self._parent._variables
        for state in self._states:
            for name, variable in state._variables.items():
                taken = name in there and not there[name].gathered
                if variable not in self._inherited and not taken:
                    found.setdefault(name, []).append(variable)
        return found
