"""What a tier is started with."""

from __future__ import annotations

import msgspec


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`folder` is the root of all stores; it may take `limit_bytes`."""

    folder: str
    limit_bytes: int
