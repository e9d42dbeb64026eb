"""Models by name: a catalogue, a local store, and the sources that fill it."""

from phloem.srt.hub.catalogue import CATALOGUE
from phloem.srt.hub.models import (
    LocalModel,
    ModelDetails,
    list_models,
    pull,
    remove,
    resolve_model,
    show,
)
from phloem.srt.hub.progress import SILENT, Progress

__all__ = [
    "CATALOGUE",
    "SILENT",
    "LocalModel",
    "ModelDetails",
    "Progress",
    "list_models",
    "pull",
    "remove",
    "resolve_model",
    "show",
]
