"""A program that runs while somebody reads along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal, NoReturn, Self, overload

from phloem.lang.errors import UsageError
from phloem.lang.prompt import transcript
from phloem.lang.run import Run
from phloem.lang.state import Binding, Record, State
from phloem.lang.variable import Variable


class Stream(State):
    """The state of a program that runs, for reading: of its text as it is made, of a variable as
    soon as the program has defined it. What is only there at the end is waited for.

    As a context manager it cancels the program when the block is left early.
    """

    def __init__(self, state: State, run: Run, record: Record, done: Future[None]) -> None:
        super().__init__(run)
        self._state = state
        self._followed = record
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

    def __contains__(self, name: object) -> bool:
        """Whether the variable is defined so far."""
        return name in self._state

    def __setitem__(self, name: str, value: object) -> None:
        self._state[name] = value

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The pieces of all the program's text, or of one variable (whose definition is waited
        for). Raises where the text cannot go on."""
        if name is not None:
            yield from self._variable(name).text_iter()
            return
        first = True
        for entry in self._followed:
            if isinstance(entry, Binding):
                continue
            if isinstance(entry, Variable):
                yield from entry.text_iter()
            elif shown := transcript(entry, first=first):
                yield shown
            first = False
        self._raise_failure()

    @overload
    def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, name: str, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]: ...
    def text_async_iter(
        self, name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str] | AsyncIterator[tuple[str, dict[str, Any]]]:
        """`text_iter` on an event loop; `return_meta_data` as for `State.text_async_iter`."""
        if name is None:
            return self._all_text()
        return self._with_meta(name) if return_meta_data else self._pieces(name)

    def text(self) -> str:
        """All the program's text, at its end."""
        return self.result().text()

    def messages(self) -> list[dict[str, str]]:
        """All messages, at the program's end."""
        return self.result().messages()

    @property
    def returned(self) -> Any:
        """What the program's function returned; waits for its end."""
        return self.result().returned

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self._state.arguments

    def error(self) -> BaseException | None:
        """What went wrong, None if nothing did; waits for the program's end."""
        self.sync()
        return self._state.error()

    def sync(self) -> None:
        """Wait for the program's end, good or not."""
        self._done.exception()

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

    # ------------------------------------------------------------------ inside

    def __repr__(self) -> str:
        return f"<Stream of {self._state!r}>"

    def _variable(self, name: str) -> Variable:
        if name not in self._state:
            for entry in self._followed:
                if isinstance(entry, Binding) and entry.name == name:
                    break
        return self._state._variable(name)

    async def _defined(self, name: str) -> Variable:
        if name not in self._state:
            async for entry in self._followed:
                if isinstance(entry, Binding) and entry.name == name:
                    break
        return self._state._variable(name)

    async def _all_text(self) -> AsyncIterator[str]:
        first = True
        async for entry in self._followed:
            if isinstance(entry, Binding):
                continue
            if isinstance(entry, Variable):
                async for piece in entry.text_async_iter():
                    yield piece
            elif shown := transcript(entry, first=first):
                yield shown
            first = False
        self._raise_failure()

    async def _pieces(self, name: str) -> AsyncIterator[str]:
        async for piece in (await self._defined(name)).text_async_iter():
            yield piece

    async def _with_meta(self, name: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        async for piece in (await self._defined(name)).text_async_iter_with_meta():
            yield piece

    def _check_open(self) -> NoReturn:
        raise UsageError("only the program itself adds to its state while it runs")

    def _raise_failure(self) -> None:
        if (failure := self._state.error()) is not None:
            raise failure
