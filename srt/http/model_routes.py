"""The served model, `GET /v1/models`: as OpenAI has it, and to who says `anthropic-version` as
Anthropic does."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from aiohttp import web

from phloem.srt.generation import ModelCard
from phloem.srt.http.anthropic.models import (
    LIFECYCLE_KEYS,
    Lifecycle,
    ModelInfo,
    ModelPage,
    ModelQuery,
    model_info,
    model_page,
)
from phloem.srt.http.body import read_query, validation_error
from phloem.srt.http.context import serving
from phloem.srt.http.errors import AnthropicError, ErrorEnvelope, ErrorShape, shape_for
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import check_model


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "phloem"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def models(request: web.Request) -> web.Response:
    """With the header `anthropic-version` the reply, and the query, are those of Anthropic's API;
    without, those of OpenAI's, whose list has no pages."""
    card = serving(request).engine.card
    if shape_for(request) is not ErrorShape.ANTHROPIC:
        return json_response(ModelList(data=[_model(card)]))
    bare = request.rel_url.without_query_params(*LIFECYCLE_KEYS)
    query = read_query(request.clone(rel_url=bare), ModelQuery)
    known = [one for one in (model_info(card),) if one.lifecycle in _lifecycles(request)]
    return json_response(model_page(known, query))


async def model(request: web.Request) -> web.Response:
    """As Anthropic has it with the header `anthropic-version`."""
    card = serving(request).engine.card
    check_model(request.match_info["model"], card)
    anthropic = shape_for(request) is ErrorShape.ANTHROPIC
    return json_response(model_info(card) if anthropic else _model(card))


def _lifecycles(request: web.Request) -> list[Lifecycle]:
    """The stages that are asked for. Raises `InvalidRequest` for others than there are."""
    asked = [one for key in LIFECYCLE_KEYS for one in request.query.getall(key, [])]
    try:
        return msgspec.convert(asked or ["active", "deprecated"], list[Lifecycle])
    except msgspec.ValidationError as error:
        raise validation_error(error, "lifecycle") from None


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.name, created=card.created, root=card.path, max_model_len=card.context_length
    )


_ERROR: Final = ErrorEnvelope | AnthropicError

ROUTES: Final = (
    Route(
        "GET",
        "/v1/models",
        models,
        Access.KEY,
        "The served models",
        query=ModelQuery,
        reply=ModelList | ModelPage,
        error=_ERROR,
    ),
    Route(
        "GET",
        "/v1/models/{model:.+}",
        model,
        Access.KEY,
        "A served model",
        reply=Model | ModelInfo,
        error=_ERROR,
    ),
)
