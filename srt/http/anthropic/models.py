"""The served models as Anthropic's Models API has them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from phloem.srt.generation import ModelCard
from phloem.srt.http.body import invalid

Lifecycle = Literal["active", "deprecated", "retired"]

LIFECYCLE_KEYS: Final = ("lifecycle", "lifecycle[]")
"""How a query spells it; it may come several times."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """A model. What Anthropic says of its own models only is null. `created_at` is when the
    server loaded it (RFC 3339, UTC)."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Lifecycle = "active"
    max_input_tokens: int
    max_tokens: int
    capabilities: None = None
    line: None = None
    deprecated_at: None = None
    retires_at: None = None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """`has_more`: there are others beyond the page, in the direction that was asked for."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which page: the one behind `after_id`, or the one that ends before `before_id`."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def model_info(card: ModelCard) -> ModelInfo:
    created = datetime.fromtimestamp(card.created, UTC)
    return ModelInfo(
        id=card.name,
        display_name=card.name,
        created_at=created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        max_input_tokens=card.context_length,
        max_tokens=card.context_length,
    )


def model_page(models: Sequence[ModelInfo], query: ModelQuery) -> ModelPage:
    """A page of `models`, newest first. Raises `InvalidRequest` for a cursor that is no model's,
    and for two."""
    if query.after_id is not None and query.before_id is not None:
        raise invalid("after_id and before_id cannot be had at once.", "before_id")
    if query.before_id is not None:
        rest = models[: _place(models, query.before_id, "before_id")]
        data = list(rest[-query.limit :])
    else:
        rest = models
        if query.after_id is not None:
            rest = models[_place(models, query.after_id, "after_id") + 1 :]
        data = list(rest[: query.limit])
    return ModelPage(
        data=data,
        has_more=len(rest) > len(data),
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


def _place(models: Sequence[ModelInfo], id_: str, param: str) -> int:
    ids = [model.id for model in models]
    if id_ not in ids:
        raise invalid(f"{param}: there is no model {id_!r}.", param)
    return ids.index(id_)
