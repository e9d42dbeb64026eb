"""Which backend a program runs on: what users may give, and the default one."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, cast, runtime_checkable

from phloem.lang.backend.base import Backend
from phloem.lang.errors import UsageError


@runtime_checkable
class EngineHandle(Protocol):
    """An engine that lives on an event loop of its own, such as `phloem.BlockingEngine`."""

    @property
    def engine(self) -> Any: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


@runtime_checkable
class AsyncEngine(Protocol):
    """An engine on the caller's event loop, such as `phloem.Engine`."""

    def generate(self, request: Any) -> Any: ...

    def tokenize(self, text: str, *, special: bool = True) -> Any: ...

    def render_chat(self, messages: Any) -> Any: ...


BackendLike = Backend | EngineHandle | AsyncEngine | str
"""Where a program may run: a backend, an engine in this process, or the URL of a Phloem server."""

_default: Backend | None = None
_by_url: dict[str, Backend] = {}


def set_default_backend(backend: BackendLike | None) -> None:
    """The backend of every run that names none: a backend, an engine, or a server's URL. None
    unsets it."""
    global _default
    _default = None if backend is None else as_backend(backend)


def default_backend() -> Backend:
    """The default backend; raises `UsageError` when there is none."""
    if _default is None:
        raise UsageError(
            "no model to run on: pass backend=…, or call "
            'phloem.set_default_backend("http://127.0.0.1:30000") once'
        )
    return _default


def as_backend(value: BackendLike) -> Backend:
    """A backend from whatever names one. One URL is one backend, so that runs share connections."""
    if isinstance(value, str):
        if value not in _by_url:
            from phloem.lang.backend.http import HttpBackend

            _by_url[value] = HttpBackend(value)
        return _by_url[value]
    if isinstance(value, Backend):
        return value
    if not isinstance(value, EngineHandle | AsyncEngine):
        raise TypeError(
            f"a backend must be a Backend, an engine or a URL, not {type(value).__name__}"
        )
    from phloem.lang.backend.local import LocalBackend

    if isinstance(value, EngineHandle):
        return LocalBackend(value.engine, loop=value.loop)
    try:
        return LocalBackend(cast("Any", value), loop=asyncio.get_running_loop())
    except RuntimeError:
        raise UsageError(
            "this engine lives on an event loop, and none runs here: use phloem.BlockingEngine, "
            "or await program.arun(backend=engine) where the engine was started"
        ) from None


def refuse_to_block(backend: Backend) -> None:
    """Raise `UsageError` if waiting here would stop the event loop that the answer comes from."""
    loop = getattr(backend, "loop", None)
    if loop is None:
        return
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        return
    if here is loop:
        raise UsageError(
            "run() would block the event loop of its own engine for ever: use await arun()"
        )
