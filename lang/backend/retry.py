"""When a backend says "too busy": how long to wait, and how often."""

from __future__ import annotations

import random
from collections.abc import Iterator

from phloem.lang.recording.spans import note_retry

_FIRST_S = 0.2
_LONGEST_S = 5.0


def backoff(retries: int) -> Iterator[float]:
    """Seconds to wait before each retry: doubling, bounded, spread by up to half so that clients
    refused together do not come back together."""
    for attempt in range(retries):
        note_retry()
        yield min(_FIRST_S * 2**attempt, _LONGEST_S) * random.uniform(0.5, 1.0)
