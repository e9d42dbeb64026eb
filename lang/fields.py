"""The values of a JSON answer, as the text that completes them comes."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

from phloem.constrained.json_events import Field, JsonEvents
from phloem.lang.errors import UsageError

FieldPair = tuple[str, Any]
"""The path of a value in a JSON answer, as a JSON pointer, and the value."""


def fields_of(pieces: Iterable[str]) -> Iterator[FieldPair]:
    """`(path, value)` of every scalar and every empty list or object, in the order of the text;
    paths are JSON pointers. Raises `UsageError` where the text is not JSON."""
    events = JsonEvents()
    for piece in pieces:
        yield from _pairs(_feed(events, piece))
    yield from _pairs(_finish(events))


async def fields_of_async(pieces: AsyncIterable[str]) -> AsyncIterator[FieldPair]:
    """The same on an event loop."""
    events = JsonEvents()
    async for piece in pieces:
        for pair in _pairs(_feed(events, piece)):
            yield pair
    for pair in _pairs(_finish(events)):
        yield pair


def _pairs(fields: list[Field]) -> Iterator[FieldPair]:
    return ((field.path, field.value) for field in fields)


def _feed(events: JsonEvents, piece: str) -> list[Field]:
    try:
        return events.feed(piece)
    except ValueError as exc:
        raise UsageError(f"the text has no fields: {exc}") from exc


def _finish(events: JsonEvents) -> list[Field]:
    try:
        return events.finish()
    except ValueError as exc:
        raise UsageError(f"the text has no fields: {exc}") from exc
