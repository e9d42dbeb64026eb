"""The text that perplexity is measured on by default: prose, JSON, code and dialogue."""

from __future__ import annotations

from importlib.resources import files


def sample_text() -> str:
    """About two thousand tokens, written for this purpose."""
    return files("phloem.srt.quantize").joinpath("sample.txt").read_text(encoding="utf-8")
