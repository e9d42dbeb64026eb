"""What a reply says of its own request: fields that were not known, and what was done otherwise
than it was asked for. An error refuses; a warning is for what leaves the answer a right one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk, ModelCard
from phloem.srt.http.body import given
from phloem.srt.http.protocol import GenerationFields
from phloem.srt.tenants import Tenant


class ReplyWarning(msgspec.Struct, frozen=True):
    """`param` is the path of the field that it is about."""

    param: str
    message: str


class Warnings:
    """The warnings of one request, as they are found out."""

    def __init__(self, unknown: Iterable[str] = ()) -> None:
        self._found = [
            ReplyWarning(name, f"`{name}` is not known here; nothing was done with it.")
            for name in unknown
        ]
        self._limit: tuple[str, int, int] | None = None

    def add(self, param: str, message: str) -> None:
        self._found.append(ReplyWarning(param, message))

    def expect_length(self, param: str, asked: int, longest: int) -> None:
        """`asked` tokens of output are wanted, and prompt and output have `longest` together: say
        so if a prompt does not leave them."""
        self._limit = (param, asked, longest)

    def see(self, chunk: Chunk) -> None:
        """Take in a chunk of the answer: with the first one the length of a prompt is known."""
        if self._limit is None or not chunk.prompt_tokens:
            return
        param, asked, longest = self._limit
        room = longest - chunk.prompt_tokens
        if asked > room:
            self._limit = None
            self.add(
                param,
                f"{param} is {asked}, and was taken for {room}: prompt and answer together have"
                f" {longest} tokens, and the prompt has {chunk.prompt_tokens}.",
            )

    @property
    def told(self) -> list[ReplyWarning] | UnsetType:
        """All of them; unset when there are none."""
        return list(self._found) or UNSET


def longest_sequence(card: ModelCard, tenant: Tenant) -> int:
    """Tokens that a prompt of `tenant` and its answer may have together."""
    return min(card.context_length, tenant.kv_quota or card.context_length)


def warn_of_hints(fields: GenerationFields, warnings: Warnings) -> None:
    """Fields that ask for something beside the answer, which is not to be had here."""
    if fields.store:
        warnings.add("store", "Chat completions are not stored.")
    if fields.service_tier not in (None, "auto", "default"):
        warnings.add("service_tier", "There is one tier; `priority` orders requests.")
    if given(fields.prediction):
        warnings.add("prediction", "Predictions are not used; the answer is the same without.")
    if fields.prompt_cache_retention is not None:
        warnings.add("prompt_cache_retention", "Prompts stay cached while there is room for them.")
