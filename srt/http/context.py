"""What every handler needs, under one typed key of the application."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import EngineClient
from phloem.srt.metrics.prometheus import ServerMetrics


class InFlight:
    """Which engine requests a client's request id stands for, while they run.

    One HTTP request with `n` choices or several prompts is several engine requests; aborting the
    id that the client knows ends them all.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, ...]] = {}

    @contextmanager
    def hold(self, rid: str, parts: Sequence[str]) -> Iterator[None]:
        """Know `rid` for the duration. Raises `InvalidRequest` if it is already in use."""
        if rid in self._parts:
            raise InvalidRequest(
                f"A request with the id {rid!r} is still running.",
                param="rid",
                code="duplicate_request_id",
            )
        self._parts[rid] = tuple(parts)
        try:
            yield
        finally:
            del self._parts[rid]

    def parts(self, rid: str) -> tuple[str, ...]:
        """The engine's ids for `rid`; itself when it is not one of ours."""
        return self._parts.get(rid, (rid,))


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The engine, the options, and what the HTTP layer itself keeps."""

    engine: EngineClient
    options: ServerOptions
    metrics: ServerMetrics
    keepalive_s: float
    in_flight: InFlight = field(default_factory=InFlight)


SERVING: Final = web.AppKey("serving", Serving)
REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""The id that the current request's response carries; routes that generate set their own."""


def serving(request: web.Request) -> Serving:
    """The `Serving` of the application that got `request`."""
    return request.config_dict[SERVING]
