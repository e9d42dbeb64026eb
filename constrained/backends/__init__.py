"""Grammar engines by name, loaded when they are asked for."""

from __future__ import annotations

import importlib
from typing import cast

from phloem.constrained.base import Backend
from phloem.constrained.vocab import Vocabulary

BACKENDS = {
    "llguidance": "phloem.constrained.backends.llguidance:LlguidanceBackend",
    "routed": "phloem.constrained.backends.routed:RoutedBackend",
    "xgrammar": "phloem.constrained.backends.xgrammar:XGrammarBackend",
}
"""Dotted names of backend classes; each is made with a `Vocabulary`."""


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The backend called `name`, for this vocabulary.

    Raises:
        ValueError: there is no such backend; the message lists those there are.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"unknown grammar backend {name!r}; there are {', '.join(sorted(BACKENDS))}"
        )
    module, _, cls = BACKENDS[name].partition(":")
    return cast("Backend", getattr(importlib.import_module(module), cls)(vocabulary))
