"""What is remembered of requests that were admitted, to tell later why they hit or missed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from phloem.radix import Divergence
from phloem.srt.scheduler.request import Request

MAX_REQUESTS, MAX_TOKENS = 1024, 1 << 20


@dataclass(frozen=True)
class Admission:
    """A request's prompt when it was admitted first, and what the tree had of it."""

    prompt: array[int]
    namespace: str
    divergence: Divergence
    at: float


class Past:
    """Admissions by request id, the latest ones: at most `MAX_REQUESTS` with `MAX_TOKENS` tokens
    in all."""

    def __init__(self) -> None:
        self._admissions: OrderedDict[str, Admission] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._admissions)

    def add(self, request: Request, divergence: Divergence, now: float) -> None:
        self._forget(request.rid)
        prompt = request.tokens[: request.prompt_len]
        self._admissions[request.rid] = Admission(prompt, request.namespace, divergence, now)
        self._tokens += len(prompt)
        while len(self._admissions) > MAX_REQUESTS or self._tokens > MAX_TOKENS:
            self._forget(next(iter(self._admissions)))

    def _forget(self, rid: str) -> None:
        old = self._admissions.pop(rid, None)
        if old is not None:
            self._tokens -= len(old.prompt)

    def get(self, rid: str) -> Admission | None:
        return self._admissions.get(rid)
