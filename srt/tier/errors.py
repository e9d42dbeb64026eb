"""Why there is no tier, or not this block."""

from __future__ import annotations


class TierError(Exception):
    """The tier cannot be used; the server goes on without. The message says why."""


class DamagedBlock(Exception):
    """A block is not what was written. It is forgotten already."""
