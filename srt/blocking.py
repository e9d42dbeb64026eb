"""The engine for programs without an event loop: the same calls, each waited for.

    with BlockingEngine() as engine:
        print(engine.complete(GenerateRequest(prompt="Once upon a time")).text)

The engine lives on a loop in a thread of its own, so many threads may use one of these at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from phloem.srt.config import ServeConfig
from phloem.srt.engine import Engine
from phloem.srt.generation import ChatMessage, Chunk, Completion, GenerateRequest, collect
from phloem.srt.hub import SILENT, Progress

T = TypeVar("T")


class BlockingEngine:
    """`Engine` behind plain methods. Raises what `Engine` raises. Close it, or use `with`."""

    def __init__(self, config: ServeConfig | None = None, *, progress: Progress = SILENT) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="phloem engine", daemon=True
        )
        self._thread.start()
        self._closed = False
        try:
            self.engine = self._call(self._make(config, progress))
        except BaseException:
            self._stop_loop()
            raise

    @staticmethod
    async def _make(config: ServeConfig | None, progress: Progress) -> Engine:
        engine = Engine(config, progress=progress)
        await engine.start()
        return engine

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop the engine lives on."""
        return self._loop

    def complete(self, request: GenerateRequest) -> Completion:
        """The whole answer to one request."""
        return self._call(collect(self.engine.generate(request)))

    def complete_many(self, requests: list[GenerateRequest]) -> list[Completion]:
        """The answers to many requests, which run together, in the order given."""

        async def gather() -> list[Completion]:
            return await asyncio.gather(*(collect(self.engine.generate(r)) for r in requests))

        return self._call(gather())

    def stream(self, request: GenerateRequest) -> Iterator[Chunk]:
        """Chunks as they come. Leaving the loop early aborts the request."""
        chunks = self.engine.generate(request)
        step: asyncio.Task[Any] | None = None

        async def following() -> Chunk | None:
            nonlocal step
            step = asyncio.current_task()
            return await anext(chunks, None)

        async def closed() -> None:
            # Ctrl-C may leave `_call` after it handed a step over and before it could cancel it.
            if step is not None and not step.done():
                step.cancel()
                await asyncio.wait({step})
            await chunks.aclose()

        try:
            while (chunk := self._call(following())) is not None:
                yield chunk
        finally:
            self._call(closed())

    def render_chat(self, messages: list[ChatMessage]) -> list[int]:
        """A chat as the token ids of its prompt, ready for the assistant's turn."""
        return self._call(self.engine.render_chat(messages))

    def close(self) -> None:
        """Stop the processes and the loop. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._call(self.engine.close())
            self._stop_loop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the waiting thread: the work must not go on without it
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
