"""The `s` of a program: text that grows, variables, forks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, assert_never, overload

from phloem.lang import ir
from phloem.lang.errors import GenerationError, UsageError
from phloem.lang.feed import Feed
from phloem.lang.fields import FieldPair, fields_of, fields_of_async
from phloem.lang.interpreter import run_gather, run_gen, run_select
from phloem.lang.prompt import Event, Prompt
from phloem.lang.run import Run
from phloem.lang.variable import Meta, Variable

Content = str | ir.Node
JoinMode = Literal["gather", "append"]


@dataclass(frozen=True, slots=True)
class Binding:
    """A variable got its name."""

    name: str
    variable: Variable


Record = Feed[Event | Binding]  # what someone who watches a running program follows


class State:
    """One line of text and its variables. `s += …` returns at once; reading waits.

    A state is for one thread: that of its program, or for a fork the one that works on it.
    """

    returned: Any = None  # what the program's function returned
    arguments: Mapping[str, Any] = {}  # what it was called with

    def __init__(
        self,
        run: Run,
        prompt: Prompt | None = None,
        variables: Mapping[str, Variable] | None = None,
        record: Record | None = None,
    ) -> None:
        self._run = run
        self._prompt = Prompt() if prompt is None else prompt
        self._variables = dict(variables or {})
        self._record = record
        self._failure: BaseException | None = None
        self._closed: str | None = None  # why nothing can be appended any more
        self._ended = False

    # ------------------------------------------------------------------ building

    def __iadd__(self, value: Content) -> Self:
        """Append text or an expression. Raises `TypeError` for anything else, `UsageError` where
        it cannot stand."""
        self._check_open()
        self._append(ir.as_node(value))
        return self

    @overload
    def system(self, content: Content) -> None: ...
    @overload
    def system(self) -> AbstractContextManager[None]: ...
    def system(self, content: Content | None = None) -> AbstractContextManager[None] | None:
        """A system message: `s.system("…")`, or `with s.system(): s += "…"`."""
        return self._message("system", content)

    @overload
    def user(self, content: Content) -> None: ...
    @overload
    def user(self) -> AbstractContextManager[None]: ...
    def user(self, content: Content | None = None) -> AbstractContextManager[None] | None:
        """A user message, in the same two ways."""
        return self._message("user", content)

    @overload
    def assistant(self, content: Content) -> None: ...
    @overload
    def assistant(self) -> AbstractContextManager[None]: ...
    def assistant(self, content: Content | None = None) -> AbstractContextManager[None] | None:
        """An assistant message, in the same two ways; the place for `gen` and `select`."""
        return self._message("assistant", content)

    def fork(self, size: int = 1) -> Group:
        """`size` states that start from here and go on independently, at the same time."""
        self._check_open()
        if size < 1:
            raise ValueError(f"fork size must be at least 1, not {size}")
        return Group(self, [self.copy() for _ in range(size)])

    def copy(self) -> State:
        """One more state that starts from here."""
        self._check_open()
        return State(self._run, self._prompt, self._variables)

    # ------------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Any:
        """The value of a variable: text, a list for `n` above 1 or a gathered one, or what was
        assigned. Blocks until it is there; raises `GenerationError` if it never will be, and
        `KeyError` when the program has no such variable."""
        return self._variable(name).outcome().value

    def __setitem__(self, name: str, value: object) -> None:
        """Bind a value of the program's own; this may replace a variable."""
        self._check_open()
        self._bind(name, Variable.known(name, value))

    def __contains__(self, name: object) -> bool:
        """Whether the variable is defined; it may still be pending."""
        return name in self._variables

    def meta(self, name: str) -> Meta:
        """How a variable came to be: token counts, finish reason, logprobs, choice scores."""
        return self._variable(name).outcome().meta

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """`meta` as a plain dict."""
        return self.meta(name).as_dict()

    def text(self) -> str:
        """All text so far; of a chat, a transcript for reading."""
        return self._prompt.text()

    def messages(self) -> list[dict[str, str]]:
        """The chat so far as `{"role", "content"}` dicts; empty for a plain text program."""
        return [{"role": m.role, "content": m.content} for m in self._prompt.messages()]

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text of a variable, or all text so far, piece by piece as it is made."""
        if name is None:
            yield from self._prompt.pieces()
            return
        yield from self._variable(name).text_iter()

    async def text_async_iter(self, name: str) -> AsyncIterator[str]:
        """The text of a variable, piece by piece, on an event loop."""
        async for piece in self._variable(name).text_async_iter():
            yield piece

    def fields_iter(self, name: str) -> Iterator[FieldPair]:
        """`(path, value)` of each value in a JSON variable, as soon as it is complete: scalars and
        empty containers, in the order of the text, paths as JSON pointers."""
        yield from fields_of(self.text_iter(name))

    async def fields_async_iter(self, name: str) -> AsyncIterator[FieldPair]:
        """`fields_iter` on an event loop."""
        async for pair in fields_of_async(self.text_async_iter(name)):
            yield pair

    def sync(self) -> None:
        """Block until every call of this state has ended, well or not."""
        for variable in self._all_variables():
            variable.settle()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, None if nothing has so far.

        Once the program has ended this is the exception that ended it, else the first failed call
        whose error the program never met. A fork reports its own failed calls.
        """
        if self._ended:
            return self._failure
        return next((e for v in self._all_variables() if (e := v.error) is not None), None)

    # ------------------------------------------------------------------ inside

    def __repr__(self) -> str:
        names = {n: "done" if v.done else "pending" for n, v in self._variables.items()}
        return f"<State {names}>"

    def _append(self, node: ir.Node) -> None:
        match node:
            case ir.Text(text):
                self._advance(self._prompt.with_text(text))
            case ir.Seq(parts):
                for part in parts:
                    self._append(part)
            case ir.Role(role, content):
                with self._open(role):
                    self._append(content)
            case ir.Gen() | ir.Select():
                self._call(node)
            case never:
                assert_never(never)

    def _call(self, node: ir.Gen | ir.Select) -> None:
        prompt = self._prompt
        prompt.check_call()
        variable = Variable(node.name)
        if node.name is not None:
            self._check_new(node.name)
            self._bind(node.name, variable)
        match node:
            case ir.Gen():
                many = node.sampling.over(self._run.sampling).samples > 1
                self._run.start(variable, partial(run_gen, self._run, prompt, node, variable))
            case ir.Select():
                many = False
                self._run.start(variable, partial(run_select, self._run, prompt, node, variable))
        if not many:  # several answers are for the program to choose from: none enters the text
            self._advance(prompt.with_variable(variable))

    def _message(
        self, role: ir.RoleName, content: Content | None
    ) -> AbstractContextManager[None] | None:
        self._check_open()
        if content is None:
            return self._open(role)
        self._append(ir.Role(role, ir.as_node(content)))
        return None

    @contextmanager
    def _open(self, role: ir.RoleName) -> Iterator[None]:
        self._advance(self._prompt.begin(role))
        try:
            yield
        finally:
            self._advance(self._prompt.end())

    def _advance(self, prompt: Prompt) -> None:
        if self._record is not None:
            for event in prompt.events[len(self._prompt.events) :]:
                self._record.push(event)
        self._prompt = prompt

    def _bind(self, name: str, variable: Variable) -> None:
        self._variables[name] = variable
        if self._record is not None:
            self._record.push(Binding(name, variable))

    def _gather(self, name: str, variables: Sequence[Variable]) -> None:
        self._check_new(name)
        gathered = Variable(name)
        self._bind(name, gathered)
        self._run.start(gathered, partial(run_gather, variables))

    def _variable(self, name: str) -> Variable:
        variable = self._variables.get(name)
        if variable is not None:
            return variable
        if isinstance(self._failure, GenerationError):
            raise self._failure.reraised() from self._failure.cause
        if self._failure is not None:
            raise GenerationError(name, self._failure) from self._failure
        known = ", ".join(map(repr, self._variables)) or "none"
        raise KeyError(f"no variable {name!r} in this state (there are: {known})")

    def _all_variables(self) -> Iterator[Variable]:
        yield from self._variables.values()
        yield from (event for event in self._prompt.events if isinstance(event, Variable))

    def _check_new(self, name: str) -> None:
        if name in self._variables:
            raise UsageError(
                f"variable {name!r} exists already: give each gen and select its own name, "
                f'as in gen(f"{name}_{{i}}")'
            )

    def _check_open(self) -> None:
        closed = self._closed or self._run.ended
        if closed is not None:
            raise UsageError(f"nothing can be added to this state: {closed}")

    def _end(self, failure: BaseException | None) -> None:
        self._ended = True
        self._failure = failure
        if self._record is not None:
            self._record.close()


class Group:
    """The states of one fork, in order."""

    def __init__(self, parent: State, states: Sequence[State]) -> None:
        self._parent = parent
        self._states = tuple(states)
        self._start = len(parent._prompt.events)
        self._inherited = frozenset(parent._variables)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    @overload
    def __getitem__(self, key: int) -> State: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | str) -> State | list[Any]:
        """`group[i]` is a state; `group["x"]` the list of the states' values of `x` (waits)."""
        if isinstance(key, int):
            return self._states[key]
        return [state[key] for state in self._states]

    def __setitem__(self, key: int, value: State) -> None:
        """Only what `group[i] += …` does: put the same state back."""
        if self._states[key] is not value:
            raise TypeError("the states of a group cannot be replaced")

    def __iadd__(self, value: Content | Sequence[Content] | Callable[[int], Content]) -> Self:
        """Append to every state: the same, one of a list each, or what a function of its index
        gives."""
        contents: Sequence[Content]
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

        "gather": each variable that *every* fork has defined becomes, there, the list of their
        values. "append": the text that each fork added is appended there, in order. Does not wait:
        whoever reads, or generates from it, does. A failed fork fails what is built on it.
        """
        if mode not in ("gather", "append"):
            raise ValueError(f"join mode must be 'gather' or 'append', not {mode!r}")
        self._parent._check_open()
        for state in self._states:
            state._check_open()
        if mode == "append":
            prompt = self._parent._prompt
            for state in self._states:
                prompt = prompt.extended(state._prompt.events[self._start :])
            self._parent._advance(prompt)
        else:
            for name in self._common_names():
                self._parent._gather(name, [state._variables[name] for state in self._states])
        for state in self._states:
            state._closed = "it was joined"

    def _common_names(self) -> list[str]:
        return [
            name
            for name in self._states[0]._variables
            if name not in self._inherited and all(name in state for state in self._states)
        ]
