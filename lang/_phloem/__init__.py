"""Phloem: a structured-generation serving runtime."""

__version__ = "0.1.0"
