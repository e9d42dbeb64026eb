"""`POST /v1/embeddings` and `POST /encode`."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Final

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from phloem.srt.http.body import BodyReader, invalid_at
from phloem.srt.http.caller import Caller, caller_of
from phloem.srt.http.context import Serving, serving
from phloem.srt.http.embeddings.calls import Embedding, EmbedOptions, Text, embed
from phloem.srt.http.embeddings.protocol import (
    MAX_TEXTS,
    UNSUPPORTED,
    UNSUPPORTED_FLAGS,
    UNSUPPORTED_RAW,
    EmbeddingData,
    EmbeddingsReply,
    EmbeddingsRequest,
    EmbeddingUsage,
    EncodeMeta,
    EncodeReply,
    EncodeRequest,
)
from phloem.srt.http.fanout import part_rid
from phloem.srt.http.native_protocol import refuse_unsupported
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import check_model, response_id

embeddings_reader = BodyReader(EmbeddingsRequest, unsupported=UNSUPPORTED)
encode_reader = BodyReader(EncodeRequest)


async def embeddings(request: web.Request) -> web.Response:
    body = await embeddings_reader.read(request)
    caller = caller_of(request, body.program, body.plan)
    return json_response(await embeddings_reply(body, serving(request), caller))


async def embeddings_reply(
    body: EmbeddingsRequest, ctx: Serving, caller: Caller
) -> EmbeddingsReply:
    """The reply of `POST /v1/embeddings`. Raises what `embed` raises, and `NotFound` for another
    model."""
    check_model(body.model, ctx.engine.card)
    options = _options(body, caller)
    texts, _ = _texts(body.input, "input")
    found = await embed(ctx, caller, response_id(body, "embd"), texts, options)
    in_base64 = body.encoding_format == "base64"
    tokens = sum(one.prompt_tokens for one in found)
    return EmbeddingsReply(
        data=[
            EmbeddingData(
                index=i,
                embedding=_base64(one.vector) if in_base64 else one.vector.tolist(),
            )
            for i, one in enumerate(found)
        ],
        model=ctx.engine.card.name,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


async def encode(request: web.Request) -> web.Response:
    ctx = serving(request)
    started = time.perf_counter()
    body = await encode_reader.read(request)
    refuse_unsupported(body, UNSUPPORTED_RAW, UNSUPPORTED_FLAGS)
    caller = caller_of(request, body.program, body.plan)
    if (body.text is None) == (body.input_ids is None):
        raise invalid_at("Exactly one of text and input_ids is wanted.", "text")
    texts, several = (
        _texts(body.text, "text")
        if body.text is not None
        else _texts(body.input_ids or [], "input_ids")
    )
    rid = body.rid or uuid.uuid4().hex
    found = await embed(ctx, caller, rid, texts, _options(body, caller))
    seconds = time.perf_counter() - started
    replies = [_encoded(one, part_rid(rid, i, len(found)), seconds) for i, one in enumerate(found)]
    return json_response(replies if several else replies[0])


def _options(body: EmbeddingsRequest | EncodeRequest, caller: Caller) -> EmbedOptions:
    return EmbedOptions(
        pooling=body.pooling,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
    )


def _texts(
    given: str | list[str] | list[int | list[int]] | list[str | int | list[int]], param: str
) -> tuple[list[Text], bool]:
    """What is to be embedded, and whether it came as a list (then so does the native reply)."""
    if isinstance(given, str):
        return [Text(given, param)], False
    if not given:
        raise invalid_at("There is nothing to embed.", param)
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [Text(ids, param)], False
    texts = [Text(one, f"{param}[{i}]") for i, one in enumerate(given) if not isinstance(one, int)]
    if len(texts) != len(given) or len({type(one.value) for one in texts}) > 1:
        raise invalid_at("A list holds strings, ids or lists of ids, not both.", param)
    if len(texts) > MAX_TEXTS:
        raise invalid_at(f"At most {MAX_TEXTS} texts, not {len(texts)}.", param)
    return texts, True


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _encoded(one: Embedding, rid: str, seconds: float) -> EncodeReply:
    return EncodeReply(
        embedding=one.vector.tolist(),
        meta_info=EncodeMeta(
            id=rid,
            finish_reason={"type": "length", "length": 0},
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
            e2e_latency=seconds,
            queue_time=one.queue_seconds,
        ),
    )


ROUTES: Final = (
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        Access.INFERENCE,
        "Embed texts",
        body=embeddings_reader,
        reply=EmbeddingsReply,
        example={"input": "Once upon a time"},
    ),
)

NATIVE_ROUTES: Final = (
    Route(
        "POST",
        "/encode",
        encode,
        Access.INFERENCE,
        "Embed texts",
        body=encode_reader,
        reply=EncodeReply | list[EncodeReply],
        example={"text": "Once upon a time"},
    ),
)
