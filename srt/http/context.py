"""What every handler needs, under one typed key of the application."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InternalError, InvalidRequest
from phloem.srt.generation import EngineClient
from phloem.srt.http.access import Keyring
from phloem.srt.http.rate_limits import Quotas
from phloem.srt.http.relaxations import Relaxations
from phloem.srt.messages import Answer, Question
from phloem.srt.metrics.prometheus import ServerMetrics
from phloem.srt.tenants import scoped

A = TypeVar("A", bound=Answer)


class InFlight:
    """Which engine requests a client's request id stands for, while they run.

    One HTTP request with `n` choices or several prompts is several engine requests; aborting the
    id that the client knows ends them all. Ids of different tenants have nothing to do with each
    other.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], tuple[str, ...]] = {}

    @contextmanager
    def hold(self, tenant: str, rid: str, parts: Sequence[str]) -> Iterator[None]:
        """Know `rid` for the duration. Raises `InvalidRequest` if it is already in use."""
        if (tenant, rid) in self._parts:
            raise InvalidRequest(
                f"A request with the id {rid!r} is still running.",
                param="rid",
                code="duplicate_request_id",
            )
        self._parts[tenant, rid] = tuple(parts)
        try:
            yield
        finally:
            del self._parts[tenant, rid]

    def parts(self, tenant: str, rid: str) -> tuple[str, ...]:
        """The engine's ids for `rid`; its own when it is not one of ours."""
        return self._parts.get((tenant, rid), (scoped(tenant, rid),))

    def all_parts(self, tenant: str) -> list[str]:
        """The engine's ids of all that runs for `tenant`."""
        held = [parts for (owner, _), parts in self._parts.items() if owner == tenant]
        return [part for parts in held for part in parts]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The engine, the options, and what the HTTP layer itself keeps."""

    engine: EngineClient
    options: ServerOptions
    keyring: Keyring
    metrics: ServerMetrics
    keepalive_s: float
    data_dir: Path | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    quotas: Quotas = field(default_factory=Quotas)
    relaxations: Relaxations = field(default_factory=Relaxations)

    async def ask(self, question: Question, expected: type[A]) -> A:
        """The scheduler's answer, which is `expected` for such a question. Raises what it refuses
        with."""
        answer = await self.engine.ask(question)
        if not isinstance(answer, expected):
            raise InternalError(f"The scheduler answered with a {type(answer).__name__}.")
        return answer


SERVING: Final = web.AppKey("serving", Serving)


def serving(request: web.Request) -> Serving:
    """The `Serving` of the application that got `request`."""
    return request.config_dict[SERVING]
