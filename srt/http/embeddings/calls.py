"""Texts → their embeddings, the same for every protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phloem.srt.errors import InternalError, InvalidRequest, PromptTooLong
from phloem.srt.generation import Chunk, EngineClient, GenerateRequest, ModelCard
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import Serving
from phloem.srt.http.gathering import last_chunks, refuse_fork
from phloem.srt.http.sampling import token_ids
from phloem.srt.messages import Pooling, SamplingParams


@dataclass(frozen=True)
class Text:
    """What is to be embedded, as text or as token ids, and the request field that it came from."""

    value: str | Sequence[int]
    param: str


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """How. `pooling` None is the model's own. `truncate` cuts off what does not fit the context,
    which is an error otherwise. `dimensions`, if given, has to be what the model has."""

    pooling: Pooling | None = None
    normalize: bool = True
    truncate: bool = False
    dimensions: int | None = None
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The vector [ModelCard.embedding_length] of one text, and what it took."""

    vector: NDArray[np.float32]
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float


async def embed(
    ctx: Serving, caller: Caller, rid: str, texts: Sequence[Text], options: EmbedOptions
) -> list[Embedding]:
    """The embeddings of `texts`, in their order, as the request `rid`.

    Raises:
        InvalidRequest: a text is empty, too long or of ids that there are not, or there are other
            dimensions.
        PhloemError: what running them raises.
    """
    card = ctx.engine.card
    refuse_fork(caller, "an embedding")
    check_dimensions(options.dimensions, card)
    requests = [
        GenerateRequest(
            prompt=await _ids(text, options, ctx.engine),
            sampling=SamplingParams(max_tokens=0),
            namespace=options.namespace,
            priority=options.priority,
            deadline_s=options.deadline_s,
            tenant=caller.tenant.name,
            program=caller.program,
            plan=caller.plan,
            embed=options.pooling or card.pooling,
        )
        for text in texts
    ]
    chunks = await last_chunks(ctx, rid, requests)
    return [_embedding(chunk, card, normalize=options.normalize) for chunk in chunks]


def check_dimensions(dimensions: int | None, card: ModelCard) -> None:
    """Raises `InvalidRequest` for another number than the model's: its vectors mean nothing when
    they are cut, as no supported model was trained for that."""
    if dimensions is not None and dimensions != card.embedding_length:
        raise InvalidRequest(
            f"dimensions: {card.name!r} has {card.embedding_length}, and its embeddings cannot be "
            "cut.",
            param="dimensions",
            code="unsupported_parameter",
        )


async def _ids(text: Text, options: EmbedOptions, engine: EngineClient) -> list[int]:
    await asyncio.sleep(0)  # one of many texts: others get their turn in between
    card = engine.card
    if not text.value:
        raise InvalidRequest("There is nothing to embed.", param=text.param, code="invalid_value")
    if not isinstance(text.value, str):
        ids, end = list(token_ids(text.value, card, text.param)), []
    else:
        ids = await engine.tokenize(text.value)
        end = [] if card.end_id is None else [card.end_id]
    if options.truncate:
        ids = ids[: card.context_length - len(end)]
    ids += end
    if len(ids) > card.context_length:
        raise PromptTooLong(
            f"The text has {len(ids)} tokens; the context has {card.context_length}.",
            param=text.param,
            code="context_length_exceeded",
        )
    return ids


def _embedding(chunk: Chunk, card: ModelCard, *, normalize: bool) -> Embedding:
    vector = np.frombuffer(chunk.embedding or b"", "<f4")
    if len(vector) != card.embedding_length:
        raise InternalError(
            f"The engine gave {len(vector)} numbers of an embedding of {card.embedding_length}."
        )
    return Embedding(
        vector=normalised(vector) if normalize else vector,
        prompt_tokens=chunk.prompt_tokens,
        cached_tokens=chunk.cached_tokens,
        queue_seconds=chunk.queue_seconds,
    )


def normalised(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """`vector` of Euclidean length 1; a zero vector stays."""
    length = np.linalg.norm(vector.astype(np.float64))
    return vector if length == 0 else (vector / length).astype(np.float32)
