"""A program that runs while somebody reads along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any, Self

from phloem.lang.fields import FieldPair, fields_of, fields_of_async
from phloem.lang.prompt import transcript
from phloem.lang.run import Run
from phloem.lang.state import Binding, Record, State
from phloem.lang.variable import Variable


class Stream:
    """Text of a running program as it is made.

    As a context manager it cancels the program when the block is left early.
    """

    def __init__(self, state: State, run: Run, record: Record, done: Future[None]) -> None:
        self._state = state
        self._run = run
        self._record = record
        self._done = done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._done.done():
            self.cancel()

    def __iter__(self) -> Iterator[str]:
        return self.text_iter()

    def __aiter__(self) -> AsyncIterator[str]:
        return self.text_async_iter()

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The pieces of all the program's text, or of one variable (whose definition is waited
        for). Raises where the text cannot go on."""
        if name is not None:
            yield from self._await_variable(name).text_iter()
            return
        first = True
        for entry in self._record:
            if isinstance(entry, Binding):
                continue
            if isinstance(entry, Variable):
                yield from entry.text_iter()
            elif shown := transcript(entry, first=first):
                yield shown
            first = False
        self._raise_failure()

    async def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """`text_iter` on an event loop."""
        first = True
        async for entry in self._record:
            if isinstance(entry, Binding):
                if entry.name == name:
                    async for piece in entry.variable.text_async_iter():
                        yield piece
                    return
            elif name is None:
                if isinstance(entry, Variable):
                    async for piece in entry.text_async_iter():
                        yield piece
                elif shown := transcript(entry, first=first):
                    yield shown
                first = False
        if name is not None:
            self._state._variable(name)  # raises: the program ended without it
        self._raise_failure()

    def fields_iter(self, name: str) -> Iterator[FieldPair]:
        """`State.fields_iter` of a variable, whose definition is waited for."""
        yield from fields_of(self.text_iter(name))

    async def fields_async_iter(self, name: str) -> AsyncIterator[FieldPair]:
        """`fields_iter` on an event loop."""
        async for pair in fields_of_async(self.text_async_iter(name)):
            yield pair

    def __getitem__(self, name: str) -> Any:
        """The value of a variable; waits for its definition too."""
        return self._await_variable(name).outcome().value

    def cancel(self) -> None:
        """End all calls. The program sees `Cancelled` at the variables it reads."""
        self._run.cancel()

    def result(self) -> State:
        """Wait for the end; like `Program.run`, raises what the program raised."""
        self._done.result()
        return self._state

    async def aresult(self) -> State:
        """`result` on an event loop."""
        await asyncio.wrap_future(self._done)
        return self._state

    def _await_variable(self, name: str) -> Variable:
        if name not in self._state:
            for entry in self._record:
                if isinstance(entry, Binding) and entry.name == name:
                    break
        return self._state._variable(name)

    def _raise_failure(self) -> None:
        if (failure := self._state.error) is not None:
            raise failure
