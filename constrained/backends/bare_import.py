"""Imports a package without the frameworks it only mentions.

xgrammar imports torch and transformers for annotations, one dtype constant and helpers that are
not used here: that is seconds of start-up and 200 MB in a process that needs neither. While the
import runs, stand-ins take their place; they are gone afterwards, so a later `import torch` gets
the real one. In a process that has torch already, nothing is replaced.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

FRAMEWORKS = ("torch", "transformers", "triton")


class _Anything(type):
    """Every attribute of the stand-in class is the class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StandIn(metaclass=_Anything):
    """Takes any arguments, and is called like any function."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


class _Framework(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


def import_bare(name: str) -> ModuleType:
    """The module `name`, imported with stand-ins for those of `FRAMEWORKS` not imported yet."""
    if name in sys.modules:
        return sys.modules[name]
    absent = [] if "torch" in sys.modules else list(FRAMEWORKS)
    sys.modules.update({framework: _Framework(framework) for framework in absent})
    try:
        return importlib.import_module(name)
    finally:
        for framework in absent:
            del sys.modules[framework]
