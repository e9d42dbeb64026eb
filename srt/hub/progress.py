"""How long work tells of itself: lines and bars, wherever the caller wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Where progress goes. The CLI draws it on stderr; a library caller may draw nothing."""

    def say(self, text: str) -> None:
        """One line for a person."""
        ...

    def bar(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A bar of `total` bytes while the context is open; call the function it gives with the
        number of bytes done so far."""
        ...


class Silent:
    """Progress that nobody watches."""

    def say(self, text: str) -> None:
        """Say nothing."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda _done: None


SILENT: Progress = Silent()
