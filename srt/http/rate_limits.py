"""What tenants may ask for in a minute: quotas of requests and tokens, and of requests at once.

A quota is a token bucket (Turner, 1986): it holds a minute's worth and is refilled evenly. A
request costs one, and its tokens: the prompt's when it is admitted, those of the output as they are
generated. A tenant is admitted when the bucket has room for the prompt; since nobody knows how long
answers get, what runs may overdraw it, and the debt has to be waited off. So over time exactly the
quota is served, whatever `max_tokens` says. What the engine refuses costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final

from phloem.srt.errors import RateLimited
from phloem.srt.http.errors import ErrorShape
from phloem.srt.tenants import Tenant

Clock = Callable[[], float]

MINUTE: Final = 60.0
_BUSY_RETRY_S: Final = 1.0


class Bucket:
    """Up to `capacity`, refilled evenly within a minute. It may be overdrawn."""

    __slots__ = ("_clock", "_level", "_updated", "capacity")

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self._clock = clock
        self._level = float(capacity)
        self._updated = clock()

    @property
    def level(self) -> float:
        """What is there now; less than nothing when it is overdrawn."""
        now = self._clock()
        gained = (now - self._updated) * self.capacity / MINUTE
        self._level = min(float(self.capacity), self._level + gained)
        self._updated = now
        return self._level

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + 1e-9))  # what was put back may have been rounded

    def take(self, amount: int) -> None:
        """Take out, or put back what is negative."""
        self._level = min(float(self.capacity), self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """How long until `amount` is there, or until it is full if that is less."""
        missing = min(amount, float(self.capacity)) - self.level
        return max(0.0, missing) * MINUTE / self.capacity


class Bill:
    """What one request has cost, while it runs. `due` says that the engine took it."""

    def __init__(self, tokens: Bucket | None, prompt_tokens: int) -> None:
        self.due = False
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens

    def accepted(self, prompt_tokens: int) -> None:
        """The engine took it; so long are its prompts together."""
        self.due = True
        self.output(prompt_tokens - self._prompt_tokens)

    def output(self, tokens: int) -> None:
        """So many more tokens were generated."""
        if self._tokens is not None and tokens:
            self._tokens.take(tokens)


class Quota:
    """One tenant's quotas, of which any may be absent."""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        per_minute, tokens = tenant.requests_per_minute, tenant.tokens_per_minute
        self.requests = None if per_minute is None else Bucket(per_minute, clock)
        self.tokens = None if tokens is None else Bucket(tokens, clock)
        self._max_concurrent = tenant.max_concurrent
        self._running = 0

    @contextmanager
    def admitted(self, prompt_tokens: int) -> Iterator[Bill]:
        """Admit one request for the duration; its bill is to be kept up to date. It costs nothing
        when an error comes before `Bill.accepted`. Raises `RateLimited`."""
        self._check(prompt_tokens)
        self._take(1, prompt_tokens)
        self._running += 1
        bill = Bill(self.tokens, prompt_tokens)
        try:
            yield bill
        finally:
            self._running -= 1
            if not bill.due:
                self._take(-1, -prompt_tokens)

    def _take(self, requests: int, tokens: int) -> None:
        if self.requests is not None:
            self.requests.take(requests)
        if self.tokens is not None:
            self.tokens.take(tokens)

    def _check(self, prompt_tokens: int) -> None:
        if self._max_concurrent is not None and self._running >= self._max_concurrent:
            raise RateLimited(
                f"{self._running} requests are running, which is all that this tenant may have.",
                code="concurrency_limit_exceeded",
                retry_after=_BUSY_RETRY_S,
            )
        wanted = (("requests", self.requests, 1), ("tokens", self.tokens, max(1, prompt_tokens)))
        for name, bucket, amount in wanted:
            seconds = 0.0 if bucket is None else bucket.seconds_until(amount)
            if bucket is not None and seconds > 1e-6:
                raise RateLimited(
                    f"The quota of {bucket.capacity:,} {name} a minute is used up; "
                    f"{amount:,} more are to be had in {seconds:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )

    def headers(self, shape: ErrorShape) -> dict[str, str]:
        """What a client is told of its quotas, as its protocol has it."""
        told: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is None:
                continue
            seconds = bucket.seconds_until(bucket.capacity)
            values = {"limit": str(bucket.capacity), "remaining": str(bucket.remaining)}
            if shape is ErrorShape.ANTHROPIC:
                values["reset"] = _instant(seconds)
                told |= {f"anthropic-ratelimit-{name}-{key}": values[key] for key in values}
            else:
                values["reset"] = _duration(seconds)
                told |= {f"x-ratelimit-{key}-{name}": values[key] for key in values}
        return told


class Quotas:
    """The quotas of all tenants that have any; as many objects as there are such tenants."""

    def __init__(
        self, tenants: Mapping[str, Tenant] = MappingProxyType({}), clock: Clock = time.monotonic
    ) -> None:
        self._quotas = {
            name: Quota(tenant, clock) for name, tenant in tenants.items() if tenant.limited
        }

    def of(self, tenant: str) -> Quota | None:
        return self._quotas.get(tenant)

    @contextmanager
    def admitted(self, tenant: str, prompts: Sequence[str | list[int]]) -> Iterator[Bill]:
        """`Quota.admitted`. Prompts that are one object are one prompt, which several choices
        share; the length of a text is not known before the engine took it."""
        quota = self._quotas.get(tenant)
        if quota is None:
            yield Bill(None, 0)
            return
        different = {id(prompt): prompt for prompt in prompts}.values()
        known = sum(len(prompt) for prompt in different if not isinstance(prompt, str))
        with quota.admitted(known) as bill:
            yield bill


def _instant(seconds: float) -> str:
    """RFC 3339, in whole seconds."""
    at = datetime.now(UTC) + timedelta(seconds=math.ceil(seconds))
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `1.5s`, `1m2s`."""
    seconds = round(seconds, 6)
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
