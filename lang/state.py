"""The `s` of a program: text that grows, variables, forks."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, assert_never, overload

from phloem.lang import ir
from phloem.lang.errors import GenerationError, UsageError
from phloem.lang.feed import Feed
from phloem.lang.fields import FieldPair, fields_of, fields_of_async
from phloem.lang.group import Group
from phloem.lang.interpreter import run_gather, run_gen, run_scope, run_select, run_thoughts
from phloem.lang.prompt import Event, Prompt
from phloem.lang.recording.recorder import ROOT, Lineage, describe
from phloem.lang.recording.spans import Trace
from phloem.lang.run import Run
from phloem.lang.schema import as_form
from phloem.lang.variable import Meta, Variable

T = TypeVar("T")
C = TypeVar("C", ir.Gen[Any], ir.Select)


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

    def __init__(
        self,
        run: Run,
        prompt: Prompt | None = None,
        variables: Mapping[str, Variable] | None = None,
        record: Record | None = None,
        lineage: Lineage = ROOT,
    ) -> None:
        self._run = run
        self._lineage = lineage  # where its calls stand in the trace
        self._prompt = Prompt() if prompt is None else prompt
        self._variables = dict(variables or {})
        self._record = record
        self._failure: BaseException | None = None
        self._closed: str | None = None  # why nothing can be appended any more
        self._ended = False
        self._arguments: Mapping[str, Any] = {}
        self._returned: Any = None
        self._joins: Group | None = None  # of a copy: what the end of its `with` joins
        self._sibling = ("", 0)  # of a fork: the group of its first call, and its width

    # ------------------------------------------------------------------ building

    def __iadd__(self, value: ir.Content) -> Self:
        """Append text or an expression. Raises `TypeError` for anything else, `UsageError` where
        it cannot stand."""
        self._check_open()
        self._append(ir.as_node(value))
        return self

    @overload
    def system(self, content: ir.Content) -> None: ...
    @overload
    def system(self) -> AbstractContextManager[None]: ...
    def system(self, content: ir.Content | None = None) -> AbstractContextManager[None] | None:
        """A system message: `s.system("…")`, or `with s.system(): s += "…"`."""
        return self._message("system", content)

    @overload
    def user(self, content: ir.Content) -> None: ...
    @overload
    def user(self) -> AbstractContextManager[None]: ...
    def user(self, content: ir.Content | None = None) -> AbstractContextManager[None] | None:
        """A user message, in the same two ways."""
        return self._message("user", content)

    @overload
    def assistant(self, content: ir.Content) -> None: ...
    @overload
    def assistant(self) -> AbstractContextManager[None]: ...
    def assistant(self, content: ir.Content | None = None) -> AbstractContextManager[None] | None:
        """An assistant message, in the same two ways; the place for `gen` and `select`."""
        return self._message("assistant", content)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """All that the block appends becomes the variable `name`, too."""
        self._check_open()
        start = len(self._prompt.events)
        yield
        events = self._prompt.events[start:]
        scope = Variable(name)
        scope.parts = tuple(event for event in events if isinstance(event, Variable))
        self._bind(name, scope)
        self._run.start(scope, partial(run_scope, events, scope))

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> Group:
        """`size` states that start from here and go on independently, at the same time.

        SGLang's `position_ids_offset` belongs to an approximation: here, texts that are joined have
        the positions at which they stand.

        Raises `ValueError` for a size below 1, `UsageError` where nothing can be added.
        """
        self._check_open()
        if position_ids_offset is not None:
            warnings.warn(
                "position_ids_offset has no effect: texts that are joined stand where they stand",
                UserWarning,
                stacklevel=2,
            )
        if size < 1:
            raise ValueError(f"fork size must be at least 1, not {size}")
        return Group(self, self._branch(size))

    def copy(self) -> State:
        """One more state that starts from here. As a context manager it is joined at the end of
        the block, like a fork of size 1."""
        self._check_open()
        (branch,) = self._branch(1)
        branch._joins = Group(self, [branch])
        return branch

    def __enter__(self) -> Self:
        if self._joins is None:
            raise UsageError("only a copy can be used in a with statement")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._joins is not None and kind is None:
            self._joins.join()

    def _branch(self, size: int) -> list[State]:
        lineages = self._run.recorder.fork(self._lineage, size)
        branches = [self._twin(lineage) for lineage in lineages]
        if size > 1:
            group = "-".join(map(str, ("fork", *lineages[0])))
            for branch in branches:
                branch._sibling = (group, size)
        return branches

    def _twin(self, lineage: Lineage) -> State:
        return State(self._run, self._prompt, self._variables, lineage=lineage)

    # ------------------------------------------------------------------ reading

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: ir.Gen[T]) -> T: ...
    @overload
    def __getitem__(self, key: ir.Select) -> str: ...
    def __getitem__(self, key: ir.Key) -> Any:
        """The value of a variable: text, or the object that a `schema` asks for; a list for `n`
        above 1 or a gathered one; or what was assigned. The key is its name, or the expression
        that makes it, by which type checkers know the value's type.

        Blocks until it is there; raises `GenerationError` if it never will be, and `KeyError` when
        the program has no such variable.
        """
        return self._variable(ir.name_of(key)).outcome().value

    def __setitem__(self, name: str, value: object) -> None:
        """Bind a value of the program's own; this may replace a variable."""
        self._bind(name, Variable.known(name, value))

    def get_var(self, name: str) -> Any:
        """`s[name]`."""
        return self[name]

    def set_var(self, name: str, value: object) -> None:
        """`s[name] = value`."""
        self[name] = value

    def value(self, name: str, form: type[T]) -> T:
        """`s[name]` as a `form`, which is checked. A text becomes one (an `int` or a `float` as
        Python reads it, anything else as JSON), and so do dicts and lists. Raises `TypeError` for
        a value that is none, and where it is read what the library of the type raises."""
        return as_form(self[name], form, name)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the program's function was called with."""
        return self._arguments

    @property
    def returned(self) -> Any:
        """What the function returned."""
        return self._returned

    @property
    def ret_value(self) -> Any:
        """SGLang's name of `returned`."""
        return self.returned

    def __contains__(self, name: object) -> bool:
        """Whether the variable is defined; it may still be pending."""
        return name in self._variables

    def meta(self, name: str) -> Meta:
        """How a variable came to be: token counts, finish reason, logprobs, choice scores. Blocks
        and raises as `state[name]` does."""
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

    @overload
    def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, name: str, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]: ...
    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str] | AsyncIterator[tuple[str, dict[str, Any]]]:
        """`text_iter` on an event loop. With `return_meta_data`, the pieces of a variable come
        with what is known then: behind the last one comes an empty one with all of
        `get_meta_info`."""
        if name is None:
            return self._prompt.pieces_async()
        variable = self._variable(name)
        if return_meta_data:
            return variable.text_async_iter_with_meta()
        return variable.text_async_iter()

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
    def trace(self) -> Trace:
        """What happened in the whole run, forks included; it grows while the run goes on."""
        return self._run.recorder.trace

    def show(self) -> None:
        """Draw the run on stdout: its tree of forks, and when each call did what."""
        from phloem.lang.recording.terminal import show

        show(self.trace)

    def explain(self) -> str:
        """In sentences: what was computed, cached, forced, of no use, and what it waited for."""
        from phloem.lang.recording.explain import explain

        return explain(self.trace)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a JSON file, for `phloem trace`. Raises `OSError`."""
        from phloem.lang.recording.files import save

        save(self.trace, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write what `show` draws as a page that needs nothing else. Raises `OSError`."""
        from phloem.lang.recording.page import save_page

        save_page(self.trace, path)

    def error(self) -> BaseException | None:
        """What went wrong, None if nothing did. Waits for the calls of this state.

        Once the program has ended this is the exception that ended it, else the first failed call
        whose error the program never met. A fork reports its own failed calls.
        """
        if self._ended:
            return self._failure
        self.sync()
        return next((e for v in self._all_variables() if (e := v.error) is not None), None)

    # ------------------------------------------------------------------ inside

    def _repr_html_(self) -> str:
        from phloem.lang.recording.page import notebook_html

        return notebook_html(self.trace)

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
            case ir.RoleBegin(role):
                self._advance(self._prompt.begin(role))
            case ir.RoleEnd(role):
                self._advance(self._prompt.end(role))
            case ir.Gen() | ir.Select():
                self._call(node)
            case ir.Placeholder():
                raise UsageError(f"{node.kind} {node.name!r} of an outline is none of this program")
            case never:
                assert_never(never)

    def _call(self, node: ir.Gen[Any] | ir.Select) -> None:
        prompt = self._prompt
        prompt.check_call()
        variable = Variable(node.name)
        if node.name is not None:
            self._bind(node.name, variable)
        self._run.recorder.begin(describe(variable.span, node), self._lineage, prompt.events)
        sibling, self._sibling = self._sibling, ("", 0)
        constraint = node.constraint if isinstance(node, ir.Gen) else None
        call = self._run.calls.queue(variable, prompt.events, constraint, sibling)
        match node:
            case ir.Gen():
                node = replace(node, sampling=node.sampling.over(self._run.sampling))
                variable.span.answers = node.sampling.samples
                many = variable.span.answers > 1
                thoughts = self._thoughts(node, variable)
                node = self._asked(node, variable, thoughts)
                work = partial(run_gen, self._run, prompt, node, variable, thoughts)
            case ir.Select():
                many = False
                node = self._asked(node, variable)
                work = partial(run_select, self._run, prompt, node, variable)
        self._run.start(variable, work, call)
        if not many:  # several answers are for the program to choose from: none enters the text
            self._advance(prompt.with_variable(variable))
        if self._run.one_by_one:
            variable.settle()

    def _asked(self, node: C, variable: Variable, thoughts: Variable | None = None) -> C:
        """A call is to make `variable`, and `thoughts`; `node` has all its options. The call as it
        is to be made."""
        return node

    def _thoughts(self, node: ir.Gen[Any], variable: Variable) -> Variable | None:
        """What the model thinks before it answers, where the program wants that apart."""
        if node.marks is None or node.name is None:
            return None
        name = f"{node.name}_reasoning_content"
        thoughts = Variable(name)
        thoughts.parts = (variable,)
        self._bind(name, thoughts)
        self._run.start(thoughts, partial(run_thoughts, variable))
        return thoughts

    def _message(
        self, role: ir.RoleName, content: ir.Content | None
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

    def _concatenate(self, states: Sequence[State], start: int) -> None:
        """What `states` have from event `start` on is appended."""
        prompt = self._prompt
        for state in states:
            prompt = prompt.extended(state._prompt.events[start:])
        self._advance(prompt)

    def _gather(self, name: str, variables: Sequence[Variable]) -> None:
        gathered = Variable(name)
        gathered.gathered = True
        gathered.parts = tuple(variables)
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

    def _check_open(self) -> None:
        closed = self._closed or self._run.ended
        if closed is not None:
            raise UsageError(f"nothing can be added to this state: {closed}")

    def _values(self) -> dict[str, Any]:
        """The values that there are by now."""
        found = ((name, variable.peek()) for name, variable in self._variables.items())
        return {name: outcome.value for name, outcome in found if outcome is not None}

    def _restore(
        self,
        arguments: Mapping[str, Any],
        variables: Mapping[str, Variable],
        returned: object,
        failure: BaseException | None,
    ) -> None:
        """Be the end of a program that ran earlier."""
        self._arguments = arguments
        self._returned = returned
        self._variables = dict(variables)
        self._run.ended = "its program has ended, in an earlier run"
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        self._ended = True
        self._failure = failure
        if self._record is not None:
            self._record.close()
