"""Why a model cannot be written in the form asked for."""

from __future__ import annotations


class QuantizeError(Exception):
    """The source cannot be put into a GGUF file as asked, or the file cannot be written. The
    message is for the user, whole and in one line."""
