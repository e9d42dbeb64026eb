"""What a program is made of: frozen nodes, each one thing that can be appended to a state.

`+` joins nodes and strings. A node is no text yet, so putting one into an f-string, or asking for
its `str()`, raises `TypeError` instead of freezing a `repr` into the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NoReturn, TypeVar

from phloem.constrained.spec import Constraint
from phloem.lang.choices import ChoicesMethod
from phloem.lang.reasoning import Marks
from phloem.lang.sampling import Sampling

RoleName = Literal["system", "user", "assistant"]

T_co = TypeVar("T_co", covariant=True)

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
class Gen(_Expression, Generic[T_co]):
    """One call: the model goes on from all the text so far. `name` binds the value, which is a
    `T_co`: of several answers a list.

    `decode` makes a value of an answer's text; None: it is the text. `marks` are those between
    which the model thinks: what stands there becomes a variable of its own.
    """

    name: str | None
    sampling: Sampling
    constraint: Constraint | None = None
    decode: Callable[[str], Any] | None = None
    marks: Marks | None = None


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
class RoleBegin(_Expression):
    """A message of `role` opens; what follows is in it."""

    role: RoleName


@dataclass(frozen=True, slots=True)
class RoleEnd(_Expression):
    """The open message, one of `role`, closes."""

    role: RoleName


@dataclass(frozen=True, slots=True)
class Placeholder(_Expression):
    """In an outline, a text that only a run has: of an argument, or of a variable."""

    kind: Literal["argument", "variable"]
    name: str

    def __str__(self) -> NoReturn:
        raise TypeError(
            f"{self.kind} {self.name!r} has no text in an outline: it cannot be put into an "
            "f-string or str(), and no loop can run over it. Join it with +, or trace the program "
            "with a value for it"
        )


@dataclass(frozen=True, slots=True)
class Seq(_Expression):
    """Nodes one after another."""

    parts: tuple[Node, ...]


Leaf = Text | Gen[Any] | Select | RoleBegin | RoleEnd | Placeholder
"""An expression that has no other one in it."""

Node = Leaf | Role | Seq
"""An expression. `+` joins expressions and text."""

Content = str | Node
"""What can be appended to a state: text, or an expression such as `gen(…)` and what `+` makes."""
Key = str | Gen[Any] | Select
"""A variable: by its name, or by the expression that makes it."""

_NODES = (Text, Gen, Select, RoleBegin, RoleEnd, Placeholder, Role, Seq)


def as_node(value: object) -> Node:
    """What was appended → a node. Raises `TypeError` for anything but text and nodes."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, _NODES):
        return value
    if value is None:
        raise TypeError("None was appended: does a helper of the program lack its return?")
    raise TypeError(
        f"only text and phloem expressions can be appended, not {type(value).__name__}; "
        "use str(value) for its text"
    )


def name_of(key: Key) -> str:
    """The name of the variable that `key` stands for. Raises `KeyError` for an unnamed one."""
    name = key if isinstance(key, str) else key.name
    if name is None:
        raise KeyError("an unnamed expression has no variable")
    return name


def with_marks(node: Node, marks: Marks) -> Node:
    """`node`, with `marks` in all calls that bind their answer."""
    match node:
        case Gen():
            return node if node.name is None else replace(node, marks=marks)
        case Seq(parts):
            return Seq(tuple(with_marks(part, marks) for part in parts))
        case Role(role, content):
            return Role(role, with_marks(content, marks))
        case _:
            return node


def _operand(value: object, beside: _Expression) -> Node:
    if isinstance(value, str | _Expression):
        return as_node(value)
    raise TypeError(
        f"only text and phloem expressions can be joined to {type(beside).__name__.lower()}(…), "
        f"not {type(value).__name__}"
    )


def _parts(node: object) -> tuple[Node, ...]:
    whole = as_node(node)
    return whole.parts if isinstance(whole, Seq) else (whole,)
