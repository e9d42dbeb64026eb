"""`POST /api/embed`, and the older `POST /api/embeddings`. Without a text they load the model."""

from __future__ import annotations

import time
from typing import Final

from aiohttp import web

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import BodyReader, unsupported
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.embeddings.calls import Embedding, EmbedOptions, Text
from phloem.srt.http.embeddings.calls import embed as embed_texts
from phloem.srt.http.embeddings.protocol import MAX_TEXTS
from phloem.srt.http.ollama.calls import served_model
from phloem.srt.http.ollama.protocol import EmbedBody, EmbeddingsBody
from phloem.srt.http.ollama.replies import EmbeddingsReply, EmbedReply
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import response_id

_embed_reader = BodyReader(EmbedBody)
_embeddings_reader = BodyReader(EmbeddingsBody)


async def embed(request: web.Request) -> web.Response:
    """What does not fit the context is cut off, unless `truncate` is false."""
    began = time.monotonic_ns()
    body = await _embed_reader.read(request)
    found = await _embed(
        request,
        body,
        _texts(body.input),
        truncate=body.truncate is not False,
        dimensions=body.dimensions,
    )
    queued = min((one.queue_seconds for one in found), default=0.0)
    return json_response(
        EmbedReply(
            model=body.model or serving(request).engine.card.name,
            embeddings=[one.vector.tolist() for one in found],
            total_duration=time.monotonic_ns() - began,
            load_duration=int(queued * 1e9),
            prompt_eval_count=sum(one.prompt_tokens for one in found),
        )
    )


async def embeddings(request: web.Request) -> web.Response:
    """One text, whose vector is as the model gives it."""
    body = await _embeddings_reader.read(request)
    texts = [Text(body.prompt, "prompt")] if body.prompt else []
    found = await _embed(request, body, texts, truncate=True, normalize=False)
    return json_response(EmbeddingsReply([x for one in found for x in one.vector.tolist()]))


async def _embed(
    request: web.Request,
    body: EmbedBody | EmbeddingsBody,
    texts: list[Text],
    *,
    truncate: bool,
    dimensions: int | None = None,
    normalize: bool = True,
) -> list[Embedding]:
    ctx = serving(request)
    served_model(body, ctx, load=not texts)
    num_ctx = None if body.options is None else body.options.num_ctx
    if num_ctx not in (None, ctx.engine.card.context_length):
        raise unsupported("options.num_ctx", "texts have the whole context")
    if not texts:
        return []
    caller = caller_of(request, body.program, body.plan)
    options = EmbedOptions(
        truncate=truncate,
        normalize=normalize,
        dimensions=dimensions,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
    )
    return await embed_texts(ctx, caller, response_id(body, "ollama"), texts, options)


def _texts(given: str | list[str] | None) -> list[Text]:
    if isinstance(given, list):
        if len(given) > MAX_TEXTS:
            raise InvalidRequest(
                f"At most {MAX_TEXTS} texts, not {len(given)}.", param="input", code="invalid_value"
            )
        return [Text(one, f"input[{i}]") for i, one in enumerate(given)]
    return [Text(given, "input")] if given else []


ROUTES: Final = (
    Route(
        "POST",
        "/api/embed",
        embed,
        Access.INFERENCE,
        "Embed texts",
        body=_embed_reader,
        reply=EmbedReply,
        example={"input": "Once upon a time"},
    ),
    Route(
        "POST",
        "/api/embeddings",
        embeddings,
        Access.INFERENCE,
        "Embed one text",
        body=_embeddings_reader,
        reply=EmbeddingsReply,
        example={"prompt": "Once upon a time"},
    ),
)
