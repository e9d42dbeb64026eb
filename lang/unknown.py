"""A value that a program reads before any of its calls is made. It can be appended, joined by `+`,
assigned and returned; whatever else is done with it would need the value, and is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from phloem.lang import ir
from phloem.lang.errors import UsageError
from phloem.lang.variable import Variable

_OWN: Final = "phloem.lang."


@dataclass(eq=False, slots=True)
class Places:
    """Where the function in the file `path` does what. `refusal` is the first thing that it did and
    that cannot be: it holds even where the function goes on."""

    path: str
    refusal: UsageError | None = field(default=None, init=False)

    def refuse(self, what: str, place: str | None = None) -> NoReturn:
        """Raise the `UsageError` for what was done at `place`, or else is being done."""
        error = UsageError(
            f"{place or self.here()}: {what}. run_remote sends a program as it is written, before "
            "it has any value; what needs values to go on is for run"
        )
        self.refusal = self.refusal or error
        raise error

    def here(self) -> str:
        """The line of the program that is being run."""
        frame: FrameType | None = sys._getframe(1)
        frames = []
        while frame is not None:
            if not str(frame.f_globals.get("__name__")).startswith(_OWN):
                frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return self._place(frames)

    def of(self, traceback: TracebackType | None) -> str:
        """The line of the program that an exception came from."""
        frames = []
        while traceback is not None:
            frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
            traceback = traceback.tb_next
        return self._place(frames[::-1])

    def _place(self, frames: list[tuple[str, int]]) -> str:
        """The innermost of `frames` that is in the program's own file, or else the innermost."""
        path, line = next((one for one in frames if one[0] == self.path), frames[0])
        return f"{os.path.basename(path)}, line {line}"


@dataclass(frozen=True, slots=True, eq=False)
class Unknown(ir.Placeholder):
    """The value of `variable`, or of several answers the one of `index`."""

    variable: Variable
    index: int | None
    places: Places

    def refuse(self, what: str) -> NoReturn:
        self.places.refuse(f"{what} s[{self.name!r}]")

    def __str__(self) -> NoReturn:
        self.refuse("str() or an f-string needs the text of (append it, or join it by +)")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python asks of any object
            raise AttributeError(name)
        self.refuse(f".{name} is asked of")

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance looks at
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_OWN):
            self.refuse("isinstance looks at")
        return Unknown


def _refusing(what: str) -> Callable[..., NoReturn]:
    def method(self: Unknown, *_: object) -> NoReturn:
        self.refuse(what)

    return method


_OPERATIONS: Final = {
    "a comparison looks at": ("eq", "ne", "lt", "le", "gt", "ge"),
    "a condition looks at": ("bool",),
    "a set or the key of a dict looks at": ("hash",),
    "len() or a loop needs": ("len", "iter", "reversed"),
    "in, an index or a slice looks at": ("contains", "getitem"),
    "a number is made of": ("int", "float", "index", "complex", "round"),
    "arithmetic is done with": ("mul", "rmul", "mod", "rmod", "sub", "truediv", "floordiv", "neg"),
    "a call is made of": ("call",),
}
for _what, _names in _OPERATIONS.items():
    for _name in _names:
        setattr(Unknown, f"__{_name}__", _refusing(_what))


def unknowns(value: object) -> Iterator[Unknown]:
    """Those in `value`, through lists, tuples and dicts."""
    if type(value) is Unknown:
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from unknowns(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from unknowns(one)


def filled(value: Any) -> Any:
    """`value`, with the values in it that are known by now. Raises what prevented them."""
    if type(value) is Unknown:
        found = value.variable.outcome().value
        return found if value.index is None else found[value.index]
    if not any(True for _ in unknowns(value)):
        return value
    if isinstance(value, dict):
        return {key: filled(one) for key, one in value.items()}
    make = getattr(type(value), "_make", type(value))  # of a NamedTuple
    return make([filled(one) for one in value])
