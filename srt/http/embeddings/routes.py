"""`POST /v1/embeddings` and `POST /encode`."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Final

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import BodyReader, unsupported
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
from phloem.srt.http.native_protocol import EMPTY_JSON
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import check_model

embeddings_reader = BodyReader(EmbeddingsRequest, unsupported=UNSUPPORTED)
encode_reader = BodyReader(EncodeRequest)


async def embeddings(request: web.Request) -> web.Response:
    body = await embeddings_reader.read(request)
    caller = caller_of(request, body.program)
    return json_response(await embeddings_reply(body, serving(request), caller))


async def embeddings_reply(
    body: EmbeddingsRequest, ctx: Serving, caller: Caller
) -> EmbeddingsReply:
    """The reply of `POST /v1/embeddings`. Raises what `embed` raises, and `NotFound` for another
    model."""
    check_model(body.model, ctx.engine.card)
    options = EmbedOptions(
        pooling=body.pooling,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
    )
    texts, _ = _texts(body.input, "input")
    rid = body.rid or body.request_id or f"embd-{uuid.uuid4().hex}"
    found = await embed(ctx, caller, rid, texts, options)
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
    _refuse_unsupported(body)
    caller = caller_of(request, body.program)
    if (body.text is None) == (body.input_ids is None):
        raise _invalid("Exactly one of text and input_ids is wanted.", "text")
    texts, several = (
        _texts(body.text, "text")
        if body.text is not None
        else _texts(body.input_ids or [], "input_ids")
    )
    options = EmbedOptions(
        pooling=body.pooling,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
    )
    rid = body.rid or uuid.uuid4().hex
    found = await embed(ctx, caller, rid, texts, options)
    seconds = time.perf_counter() - started
    replies = [_encoded(one, part_rid(rid, i, len(found)), seconds) for i, one in enumerate(found)]
    return json_response(replies if several else replies[0])


def _texts(
    given: str | list[str] | list[int | list[int]] | list[str | int | list[int]], param: str
) -> tuple[list[Text], bool]:
    """What is to be embedded, and whether it came as a list (then so does the native reply)."""
    if isinstance(given, str):
        return [Text(given, param)], False
    if not given:
        raise _invalid("There is nothing to embed.", param)
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [Text(ids, param)], False
    texts = [Text(one, f"{param}[{i}]") for i, one in enumerate(given) if not isinstance(one, int)]
    if len(texts) != len(given) or len({type(one.value) for one in texts}) > 1:
        raise _invalid("A list holds strings, ids or lists of ids, not both.", param)
    if len(texts) > MAX_TEXTS:
        raise _invalid(f"At most {MAX_TEXTS} texts, not {len(texts)}.", param)
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


def _refuse_unsupported(body: EncodeRequest) -> None:
    for name in UNSUPPORTED_RAW:
        if bytes(getattr(body, name)) not in EMPTY_JSON:
            raise unsupported(name)
    for name in UNSUPPORTED_FLAGS:
        if getattr(body, name):
            raise unsupported(name)


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param, code="invalid_value")


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
