"""What a program is made of: frozen nodes, each one thing that can be appended to a state.

`+` joins nodes and strings. A node is no text yet, so putting one into an f-string, or asking for
its `str()`, raises `TypeError` instead of freezing a `repr` into the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn, assert_never

from phloem.constrained.spec import Constraint
from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import Sampling

RoleName = Literal["system", "user", "assistant"]

_HINT = (
    "{} has no text yet: it cannot be put into an f-string or str(). "
    'Append it (s += "…" + {} + "…"), or read the variable once it is generated: s["name"]'
)


class _Expression:
    """Concatenation, and the guard against becoming text too early."""

    __slots__ = ()

    def __add__(self, other: object) -> Seq:
        return Seq((*_parts(self), *_parts(_operand(other, self))))

    def __radd__(self, other: object) -> Seq:
        return Seq((*_parts(_operand(other, self)), *_parts(self)))

    def __str__(self) -> NoReturn:
        raise TypeError(_HINT.format(*[f"{type(self).__name__.lower()}(…)"] * 2))

    def __format__(self, spec: str) -> NoReturn:
        self.__str__()


@dataclass(frozen=True, slots=True)
class Text(_Expression):
    """Literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Gen(_Expression):
    """One call: the model goes on from all the text so far. `name` binds the answer."""

    name: str | None
    sampling: Sampling
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Select(_Expression):
    """The model judges `choices`; `method` picks one from their logprobs."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class Role(_Expression):
    """A whole chat message of `role`."""

    role: RoleName
    content: Node


@dataclass(frozen=True, slots=True)
class Seq(_Expression):
    """Nodes one after another."""

    parts: tuple[Node, ...]


Node = Text | Gen | Select | Role | Seq


def as_node(value: object) -> Node:
    """What was appended → a node. Raises `TypeError` for anything but text and nodes."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Text | Gen | Select | Role | Seq):
        return value
    if value is None:
        raise TypeError("None was appended: does a helper of the program lack its return?")
    raise TypeError(
        f"only text and phloem expressions can be appended, not {type(value).__name__}; "
        "use str(value) for its text"
    )


def _operand(value: object, beside: _Expression) -> Node:
    if isinstance(value, str | _Expression):
        return as_node(value)
    raise TypeError(
        f"only text and phloem expressions can be joined to {type(beside).__name__.lower()}(…), "
        f"not {type(value).__name__}"
    )


def _parts(node: object) -> tuple[Node, ...]:
    match as_node(node):
        case Seq(parts):
            return parts
        case Text() | Gen() | Select() | Role() as single:
            return (single,)
        case never:
            assert_never(never)
