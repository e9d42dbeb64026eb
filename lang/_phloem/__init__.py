"""Phloem: a structured-generation serving runtime.

Everything here is loaded on first use: `import phloem` costs nothing, and `import phloem.radix` in
a worker does not load the DSL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.lang.api import (
        assistant,
        gen,
        gen_bool,
        gen_float,
        gen_int,
        gen_string,
        select,
        system,
        user,
    )
    from phloem.lang.backend.choose import set_default_backend
    from phloem.lang.backend.http import HttpBackend, connect
    from phloem.lang.backend.mock import MockBackend
    from phloem.lang.errors import (
        BackendError,
        BackendUnavailable,
        Cancelled,
        GenerationError,
        LangError,
        RequestRefused,
        Truncated,
        UsageError,
    )
    from phloem.lang.program import Program, function
    from phloem.lang.state import State
    from phloem.srt.blocking import BlockingEngine
    from phloem.srt.engine import Engine

    __version__: str

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "BlockingEngine",
    "Cancelled",
    "Engine",
    "GenerationError",
    "HttpBackend",
    "LangError",
    "MockBackend",
    "Program",
    "RequestRefused",
    "State",
    "Truncated",
    "UsageError",
    "__version__",
    "assistant",
    "connect",
    "function",
    "gen",
    "gen_bool",
    "gen_float",
    "gen_int",
    "gen_string",
    "select",
    "set_default_backend",
    "system",
    "user",
]

_MODULES = {
    "phloem.lang.api": (
        "assistant",
        "gen",
        "gen_bool",
        "gen_float",
        "gen_int",
        "gen_string",
        "select",
        "system",
        "user",
    ),
    "phloem.lang.backend.choose": ("set_default_backend",),
    "phloem.lang.backend.http": ("HttpBackend", "connect"),
    "phloem.lang.backend.mock": ("MockBackend",),
    "phloem.lang.errors": (
        "BackendError",
        "BackendUnavailable",
        "Cancelled",
        "GenerationError",
        "LangError",
        "RequestRefused",
        "Truncated",
        "UsageError",
    ),
    "phloem.lang.program": ("Program", "function"),
    "phloem.lang.state": ("State",),
    "phloem.srt.blocking": ("BlockingEngine",),
    "phloem.srt.engine": ("Engine",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("phloem")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
