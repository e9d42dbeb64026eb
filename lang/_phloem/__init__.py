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
        assistant_begin,
        assistant_end,
        gen,
        image,
        select,
        separate_reasoning,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from phloem.lang.backend.anthropic import AnthropicBackend
    from phloem.lang.backend.choose import set_default_backend
    from phloem.lang.backend.http import HttpBackend, connect
    from phloem.lang.backend.mock import MockBackend
    from phloem.lang.backend.openai import OpenAIBackend
    from phloem.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from phloem.lang.endpoints import (
        Anthropic,
        OpenAI,
        RuntimeEndpoint,
        flush_cache,
        get_server_info,
    )
    from phloem.lang.errors import (
        BackendError,
        BackendUnavailable,
        Cancelled,
        GenerationError,
        LangError,
        RecordedFailure,
        RequestRefused,
        Truncated,
        UsageError,
    )
    from phloem.lang.program import Program, function
    from phloem.lang.recording.files import save_traces
    from phloem.lang.results import BatchOutput
    from phloem.lang.scalars import gen_bool, gen_float, gen_int, gen_string
    from phloem.lang.state import State
    from phloem.runtime import Runtime
    from phloem.srt.blocking import BlockingEngine
    from phloem.srt.engine import Engine

    __version__: str
    """The version that is installed."""

__all__ = [
    "Anthropic",
    "AnthropicBackend",
    "BackendError",
    "BackendUnavailable",
    "BatchOutput",
    "BlockingEngine",
    "Cancelled",
    "Engine",
    "GenerationError",
    "HttpBackend",
    "LangError",
    "MockBackend",
    "OpenAI",
    "OpenAIBackend",
    "Program",
    "RecordedFailure",
    "RequestRefused",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "Truncated",
    "UsageError",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "connect",
    "flush_cache",
    "function",
    "gen",
    "gen_bool",
    "gen_float",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "save_traces",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

_MODULES = {
    "phloem.lang.api": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "gen",
        "image",
        "select",
        "separate_reasoning",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "phloem.lang.backend.anthropic": ("AnthropicBackend",),
    "phloem.lang.backend.choose": ("set_default_backend",),
    "phloem.lang.backend.http": ("HttpBackend", "connect"),
    "phloem.lang.backend.mock": ("MockBackend",),
    "phloem.lang.backend.openai": ("OpenAIBackend",),
    "phloem.lang.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "phloem.lang.endpoints": (
        "Anthropic",
        "OpenAI",
        "RuntimeEndpoint",
        "flush_cache",
        "get_server_info",
    ),
    "phloem.lang.errors": (
        "BackendError",
        "BackendUnavailable",
        "Cancelled",
        "GenerationError",
        "LangError",
        "RecordedFailure",
        "RequestRefused",
        "Truncated",
        "UsageError",
    ),
    "phloem.lang.program": ("Program", "function"),
    "phloem.lang.recording.files": ("save_traces",),
    "phloem.lang.results": ("BatchOutput",),
    "phloem.lang.scalars": ("gen_bool", "gen_float", "gen_int", "gen_string"),
    "phloem.lang.state": ("State",),
    "phloem.runtime": ("Runtime",),
    "phloem.srt.blocking": ("BlockingEngine",),
    "phloem.srt.engine": ("Engine",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(_module(name), name)
    else:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}")
    globals()[name] = value
    return value


def _module(name: str) -> Any:
    """The module that `name` is from."""
    try:
        return importlib.import_module(_HOME[name])
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{exc.name}.".startswith("phloem.srt."):
            raise
        reason = f"phloem.{name} is part of the runtime: install phloem instead of phloem-client"
        raise ImportError(reason) from exc


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("phloem")
    except PackageNotFoundError:
        return version("phloem-client")


def __dir__() -> list[str]:
    return sorted(__all__)
