"""The model's token table as the grammar engines need it: bytes, not strings."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token id adds to the text, and which ids never may.

    ``tokens[i]`` holds the exact bytes id ``i`` contributes; ``b""`` for special and control
    tokens. ``special_ids`` are never legal inside constrained text. ``stop_ids`` end a sequence
    and are legal exactly when the constraint is complete. ``size`` is the width of the model's
    logits, which may exceed ``len(tokens)``: the ids past the table are never legal.
    """

    tokens: list[bytes]
    special_ids: frozenset[int]
    stop_ids: tuple[int, ...]
    size: int = 0

    def __post_init__(self) -> None:
        """Default ``size`` to the table's length.

        Raises:
            ValueError: ``size`` is smaller than the table, or an id lies outside it.
        """
        if self.size == 0:
            object.__setattr__(self, "size", len(self.tokens))
        if self.size < len(self.tokens):
            raise ValueError(f"size: {self.size} is below the {len(self.tokens)} tokens given")
        for field in ("special_ids", "stop_ids"):
            bad = [i for i in getattr(self, field) if not 0 <= i < len(self.tokens)]
            if bad:
                raise ValueError(f"{field}: {bad[0]} is outside 0..{len(self.tokens) - 1}")
