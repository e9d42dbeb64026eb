"""Grammar engines by name, loaded when they are first asked for."""

from __future__ import annotations

from importlib import import_module

from phloem.constrained.base import Backend
from phloem.constrained.vocab import Vocabulary

BACKENDS: dict[str, str] = {
    "xgrammar": "phloem.constrained.backends.xgrammar:XGrammarBackend",
}


def create_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The engine called `name` for one vocabulary. Raises `ValueError` that lists the names."""
    if name not in BACKENDS:
        raise ValueError(f"unknown grammar engine {name!r}; there are {', '.join(BACKENDS)}")
    module, _, cls = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), cls)(vocabulary)
    return backend
