"""`Runtime`: an engine in this process, by the name that SGLang programs use."""

from __future__ import annotations

import dataclasses
from typing import Any

from phloem.lang.sampling import unknown_option
from phloem.srt.blocking import BlockingEngine
from phloem.srt.config import ServeConfig


class Runtime(BlockingEngine):
    """A model served in this process: `set_default_backend(Runtime(model_path=…))`.

    Options are those of `phloem serve` but for its HTTP server's, with underscores (`kv_tokens=…`).
    Raises `TypeError` for others, and what `Engine` raises.
    """

    def __init__(
        self, model_path: str | None = None, *, log_level: str = "error", **options: Any
    ) -> None:
        super().__init__(_config({"model": model_path, "log_level": log_level, **options}))

    @property
    def endpoint(self) -> Runtime:
        """Itself: what SGLang programs set as the default backend."""
        return self

    def shutdown(self) -> None:
        """`close`."""
        self.close()


def _config(options: dict[str, Any]) -> ServeConfig:
    given = {name: value for name, value in options.items() if value is not None}
    groups: dict[str, Any] = {}
    known: set[str] = set()
    for group in dataclasses.fields(ServeConfig):
        if group.name == "server":
            continue
        kind = type(getattr(ServeConfig(), group.name))
        names = {field.name for field in dataclasses.fields(kind)}
        known |= names
        groups[group.name] = kind(**{name: given[name] for name in names & given.keys()})
    for name in given:
        if name not in known:
            raise TypeError(unknown_option(name, frozenset(known)))
    return ServeConfig(**groups)
