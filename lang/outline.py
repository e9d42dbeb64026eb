"""What a program would do, without a model: its expressions, in order, with its forks.

The function runs on an `Outline` in place of a state. What only a run has, the text of arguments
that were not given and of variables, is a `Placeholder`: it can be appended and joined with `+`,
and is equal to nothing, so of two branches that depend on one the outline has the one where it is
not equal.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from phloem.lang import ir
from phloem.lang.backend.base import BackendInfo, Call, Delta, Prompt
from phloem.lang.choices import ChoiceScore
from phloem.lang.errors import UsageError
from phloem.lang.run import Run
from phloem.lang.sampling import Sampling
from phloem.lang.state import State
from phloem.lang.variable import Variable

outlining: ContextVar[bool] = ContextVar("phloem_outlining", default=False)
"""Whether a function runs for its outline: programs that it runs give theirs."""


@dataclass(frozen=True)
class Forked:
    """States that begin here."""

    states: tuple[Outline, ...]


class _Nobody:
    """The backend of an outline."""

    def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        raise UsageError(_NO_MODEL)

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        raise UsageError(_NO_MODEL)

    async def info(self) -> BackendInfo:
        return BackendInfo("none")

    async def aclose(self) -> None:
        """Nothing to let go of."""


_NO_MODEL: Final = "an outline has no model: it knows what is asked, not what is answered"


class Outline(State):
    """The outline of a program, of one of its forks, or as far as the function has come.

    `nodes` are what was appended: messages as `RoleBegin` and `RoleEnd`, and `Forked` where states
    begin. `str(outline)` draws it.
    """

    def __init__(self, title: str, origin: Outline | None = None) -> None:
        if origin is None:
            super().__init__(Run(_Nobody(), Sampling(), None, stream=False))
        else:
            super().__init__(origin._run, origin._prompt, origin._variables)
        self.title = title
        self.nodes: list[ir.Leaf | Forked] = []
        self._lists: dict[str, int] = {} if origin is None else dict(origin._lists)

    # ------------------------------------------------------------------ reading

    def prefix(self) -> Prompt | None:
        """The prompt up to the first text that only a run has; None if it begins with one. Of a
        chat it has whole messages, and the beginning of the assistant's."""
        return self._prompt.constant()

    @property
    def last_node(self) -> Outline:
        """For programs that ask SGLang's tracer for it: `outline.last_node.print_graph_dfs()`."""
        return self

    def print_graph_dfs(self) -> str:
        """`str(outline)`, which is what SGLang's method returns."""
        return str(self)

    def __str__(self) -> str:
        return "\n".join([self.title, *self._lines()])

    def __repr__(self) -> str:
        return f"<Outline of {self.title}: {len(self.nodes)} nodes>"

    def __getitem__(self, key: ir.Key) -> Any:
        """A placeholder, a list of them, or what the program assigned."""
        name = ir.name_of(key)
        variable = self._variable(name)
        if variable.done:
            return variable.outcome().value
        if name in self._lists:
            return [ir.Placeholder("variable", f"{name}[{i}]") for i in range(self._lists[name])]
        return ir.Placeholder("variable", name)

    def meta(self, name: str) -> NoReturn:
        raise UsageError(_NO_MODEL)

    def text(self) -> NoReturn:
        raise UsageError(_NO_MODEL)

    def messages(self) -> NoReturn:
        raise UsageError(_NO_MODEL)

    def text_iter(self, name: str | None = None) -> NoReturn:
        raise UsageError(_NO_MODEL)

    def text_async_iter(self, name: str | None = None, return_meta_data: bool = False) -> NoReturn:
        raise UsageError(_NO_MODEL)

    def sync(self) -> None:
        """There is nothing to wait for."""

    def error(self) -> None:
        """Nothing is asked, so nothing fails."""

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        self._check_open()
        yield
        self._define(name)

    # ------------------------------------------------------------------ inside

    def _append(self, node: ir.Node) -> None:
        match node:
            case ir.Placeholder():
                self._prompt.check_place(f"{node.kind} {node.name!r}")
                self._advance(self._prompt.with_variable(Variable(node.name)))
            case _:
                super()._append(node)
        if not isinstance(node, ir.Role | ir.Seq):
            self.nodes.append(node)

    def _call(self, node: ir.Gen[Any] | ir.Select) -> None:
        self._prompt.check_call()
        answers = node.sampling.samples if isinstance(node, ir.Gen) else 1
        if node.name is not None:
            self._define(node.name, answers if answers > 1 else None)
            if isinstance(node, ir.Gen) and node.marks is not None:
                self._define(f"{node.name}_reasoning_content")
        if answers == 1:
            self._advance(self._prompt.with_variable(Variable(node.name)))

    @contextmanager
    def _open(self, role: ir.RoleName) -> Iterator[None]:
        self.nodes.append(ir.RoleBegin(role))
        with super()._open(role):
            yield
        self.nodes.append(ir.RoleEnd(role))

    def _branch(self, size: int) -> list[State]:
        states = tuple(Outline(f"fork {i}", self) for i in range(size))
        self.nodes.append(Forked(states))
        return list(states)

    def _gather(self, name: str, variables: Sequence[Variable]) -> None:
        self._define(name, len(variables))

    def _define(self, name: str, size: int | None = None) -> None:
        self._bind(name, Variable(name))
        self._lists.pop(name, None)
        if size is not None:
            self._lists[name] = size

    def _lines(self) -> Iterator[str]:
        for node in self.nodes:
            if not isinstance(node, Forked):
                yield f"├ {_shown(node)}"
                continue
            for state in node.states:
                yield f"├┬ {state.title}"
                yield from (f"│{line}" for line in state._lines())


def outline_of(
    title: str, fn: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Outline, Exception | None]:
    """Run `fn` for its outline: that, and what `fn` raised, up to where the outline goes."""
    state = Outline(title)
    token = outlining.set(True)
    try:
        state._returned = fn(state, *arguments, **keywords)
    except Exception as exc:
        return state, exc
    finally:
        outlining.reset(token)
    return state, None


def _shown(node: ir.Leaf) -> str:
    match node:
        case ir.Text(text):
            return repr(text)
        case ir.Placeholder("argument", name):
            return f"{{{name}}}"
        case ir.Placeholder(name=name):
            return f"{{s[{name!r}]}}"
        case ir.RoleBegin(role):
            return f"{role}:"
        case ir.RoleEnd(role):
            return f"end of {role}"
        case ir.Select(name, choices):
            return f"select {name}: {' | '.join(map(repr, choices))}"
        case ir.Gen(name, _, constraint):
            kind = "" if constraint is None else f": {type(constraint).__struct_config__.tag}"
            return f"gen {name}{kind}"
