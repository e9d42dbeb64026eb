"""Questions to the scheduler that are under way, and who waits for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from phloem.srt.errors import PhloemError
from phloem.srt.messages import Answer, Question
from phloem.srt.questions import Refused


class Questions:
    """One table of waiters by question id. Ids are never used twice, so an answer that comes too
    late meets nobody."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, question: Question, send: Callable[[Question], None]) -> Answer:
        """`send` the question, with an id of its own, and wait for the answer.

        Raises `PhloemError`: what the scheduler refused with, or what `fail` was told.
        """
        self._last += 1
        number = self._last
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiter
        try:
            send(msgspec.structs.replace(question, id=number))
            answer = await waiter
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, Refused):
            raise PhloemError.from_info(answer.error)
        return answer

    def settle(self, answer: Answer) -> None:
        """Hand an answer to whoever waits for it."""
        waiter = self._waiting.pop(answer.id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail(self, error: PhloemError) -> None:
        """Nobody will answer any more."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()
