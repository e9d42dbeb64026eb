"""`POST /v1/score`: all branches of a prompt in one operation, their prefix computed once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Final

import msgspec
from aiohttp import web

from phloem.srt.errors import InternalError, PromptTooLong
from phloem.srt.generation import Chunk, EngineClient, GenerateRequest, Logprob
from phloem.srt.http.body import BodyReader, given, invalid_at, unsupported
from phloem.srt.http.caller import Caller, caller_of
from phloem.srt.http.context import Serving, serving
from phloem.srt.http.gathering import last_chunks, refuse_fork
from phloem.srt.http.logprobs import finite
from phloem.srt.http.messages import going_on_text, render_chat
from phloem.srt.http.protocol import ChatRequest, Message
from phloem.srt.http.replies import PromptTokensDetails
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.sampling import check_model, response_id, token_ids
from phloem.srt.http.scoring import Normalization, boundary, decide, label_scores
from phloem.srt.http.scoring_protocol import (
    CHAT_FIELDS,
    CHOICE_FIELDS,
    CROSS_ENCODER_FIELDS,
    ITEM_FIELDS,
    UNSUPPORTED,
    ChoiceScore,
    ChoiceScores,
    ItemScores,
    ScoreRequest,
    ScoreUsage,
)
from phloem.srt.http.tools import plan_tools
from phloem.srt.messages import SamplingParams

NO_PROMPT: Final = "\n"
"""What choices stand after where they are judged without the prompt."""

score_reader = BodyReader(ScoreRequest, unsupported=UNSUPPORTED)


async def score(request: web.Request) -> web.Response:
    ctx = serving(request)
    body = await score_reader.read(request)
    for name in CROSS_ENCODER_FIELDS:
        if given(getattr(body, name)):
            raise unsupported(
                name,
                "the served model is no cross-encoder; choices, or items with label_token_ids, "
                "can be scored",
            )
    check_model(body.model, ctx.engine.card)
    caller = caller_of(request, body.program, body.plan)
    refuse_fork(caller, "a score")
    if _given(body, ITEM_FIELDS):
        _refuse(body, CHOICE_FIELDS, "It does not go with items.")
        return json_response(await _score_items(body, ctx, caller))
    return json_response(await score_choices(body, ctx, caller))


# ----------------------------------------------------------------------- choices


async def score_choices(body: ScoreRequest, ctx: Serving, caller: Caller) -> ChoiceScores:
    """The reply to a request with choices. Raises `InvalidRequest` with the field's path, and what
    running it raises."""
    engine = ctx.engine
    texts = body.choices
    if texts is None:
        raise invalid_at("Choices, or items with label_token_ids, are wanted.", "choices")
    param, prompt, sequences = await _sequences(body, texts, engine)
    start = boundary(prompt, sequences, param)
    _check_lengths(sequences, engine.card.context_length, "choices")
    requests = [_branch(body, caller, ids, start) for ids in sequences]
    normalization = body.normalization or Normalization.TOKEN
    scored = sum(map(len, sequences)) - start * len(sequences)
    if normalization is Normalization.UNCONDITIONAL:
        _, alone, others = await _text_sequences(NO_PROMPT, texts, engine)
        at = boundary(alone, others, "choices")
        requests += [_branch(body, caller, ids, at) for ids in others]
        scored += at + sum(map(len, others)) - at * len(others)
    rid = response_id(body, "score")
    chunks = await last_chunks(ctx, rid, requests)
    logprobs = [_prompt_logprobs(chunk) for chunk in chunks]
    values = [[finite(one.logprob) for one in choice] for choice in logprobs]
    decision = decide(normalization, values[: len(texts)], values[len(texts) :])
    return ChoiceScores(
        id=rid,
        created=int(time.time()),
        model=engine.card.name,
        choice=texts[decision.index],
        index=decision.index,
        normalization=normalization,
        boundary=start,
        choices=[
            ChoiceScore(
                index=i,
                text=text,
                token_ids=[one.token_id for one in logprobs[i]],
                tokens=[one.text for one in logprobs[i]],
                logprobs=values[i],
                sum=math.fsum(values[i]),
                mean=math.fsum(values[i]) / len(values[i]),
                value=decision.values[i],
            )
            for i, text in enumerate(texts)
        ],
        usage=_usage(start + scored, min(chunk.cached_tokens for chunk in chunks[: len(texts)])),
    )


Sequences = tuple[str, list[int], list[list[int]]]
"""The prompt's field, its tokens, and those of prompt and choice as one text, for each choice."""


async def _sequences(body: ScoreRequest, choices: Sequence[str], engine: EngineClient) -> Sequences:
    prompts = [name for name in ("prompt", "input_ids", "messages") if _given(body, (name,))]
    if len(prompts) != 1:
        raise invalid_at("Exactly one of prompt, input_ids and messages is wanted.", "prompt")
    if body.messages is not None:
        return await _chat_sequences(body, body.messages, choices, engine)
    _refuse(body, CHAT_FIELDS, "It is for messages.")
    if body.prompt is not None:
        return await _text_sequences(body.prompt, choices, engine)
    ids = list(token_ids(body.input_ids or [], engine.card, "input_ids"))
    sequences = []
    for choice in choices:
        await asyncio.sleep(0)  # one of many texts: others get their turn in between
        sequences.append(ids + await engine.tokenize(choice, special=False, inside=True))
    return "input_ids", ids, sequences


async def _text_sequences(prompt: str, choices: Sequence[str], engine: EngineClient) -> Sequences:
    sequences = []
    for choice in choices:
        await asyncio.sleep(0)
        sequences.append(await engine.tokenize(prompt + choice))
    return "prompt", await engine.tokenize(prompt), sequences


async def _chat_sequences(
    body: ScoreRequest, messages: list[Message], choices: Sequence[str], engine: EngineClient
) -> Sequences:
    """Choices are the assistant's words, or how its message goes on."""
    chat = ChatRequest(
        messages=messages,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        tool_choice=body.tool_choice,
        chat_template_kwargs=body.chat_template_kwargs,
        documents=body.documents,
    )
    tools = plan_tools(chat).rendered
    prompt = await render_chat(chat, tools, engine)
    begun = going_on_text(chat)
    before = messages if begun is None else messages[:-1]
    sequences = []
    for i, choice in enumerate(choices):
        if not choice:
            raise invalid_at("The choice is empty.", f"choices[{i}]")
        said = Message(role="assistant", content=(begun or "") + choice)
        chat = msgspec.structs.replace(chat, messages=[*before, said], continue_final_message=True)
        sequences.append(await render_chat(chat, tools, engine))
    return "messages", prompt, sequences


def _branch(body: ScoreRequest, caller: Caller, ids: list[int], start: int) -> GenerateRequest:
    """Tokens of `ids` from `start` on are to be scored."""
    return _request(body, caller, ids, SamplingParams(max_tokens=0), prompt_logprobs_from=start)


def _prompt_logprobs(chunk: Chunk) -> list[Logprob]:
    found = [one for one in chunk.prompt_logprobs or () if one is not None]
    if not found:
        raise InternalError("The engine gave no logprobs of a choice.")
    return found


# ----------------------------------------------------------------------- items


async def _score_items(body: ScoreRequest, ctx: Serving, caller: Caller) -> ItemScores:
    engine = ctx.engine
    for name in ("query", "items", "label_token_ids"):
        if not _given(body, (name,)):
            raise invalid_at("It is wanted with items.", name)
    labels = token_ids(body.label_token_ids or (), engine.card, "label_token_ids")
    prompts = await _item_prompts(body, engine)
    _check_lengths(prompts, engine.card.context_length - 1, "items")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=labels
    )
    requests = [_request(body, caller, ids, sampling) for ids in prompts]
    chunks = await last_chunks(ctx, response_id(body, "score"), requests)
    return ItemScores(
        scores=[
            label_scores(_label_logprobs(chunk, len(labels)), softmax=bool(body.apply_softmax))
            for chunk in chunks
        ],
        model=engine.card.name,
        usage=_usage(sum(map(len, prompts)), sum(chunk.cached_tokens for chunk in chunks)),
    )


async def _item_prompts(body: ScoreRequest, engine: EngineClient) -> list[list[int]]:
    """Query and item as one text, or their token ids joined, for each item."""
    query, items = body.query, body.items
    items = [items] if isinstance(items, str) else items or []
    prompts: list[list[int]] = []
    for i, item in enumerate(items):
        if isinstance(query, str) and isinstance(item, str):
            await asyncio.sleep(0)
            text = item + query if body.item_first else query + item
            prompts.append(await engine.tokenize(text))
        elif isinstance(query, list) and isinstance(item, list):
            ids = list(token_ids(query, engine.card, "query"))
            own = list(token_ids(item, engine.card, f"items[{i}]"))
            prompts.append(own + ids if body.item_first else ids + own)
        else:
            raise invalid_at("Query and items are all texts, or all token ids.", f"items[{i}]")
        if not prompts[-1]:
            raise invalid_at("Query and item are empty.", f"items[{i}]")
    return prompts


def _label_logprobs(chunk: Chunk, count: int) -> list[float]:
    found = [one.logprob for one in chunk.logprobs[0].chosen] if chunk.logprobs else []
    if len(found) != count:
        raise InternalError(f"The engine gave {len(found)} logprobs of {count} labels.")
    return found


# ----------------------------------------------------------------------- both


def _request(
    body: ScoreRequest,
    caller: Caller,
    ids: list[int],
    sampling: SamplingParams,
    *,
    prompt_logprobs_from: int | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        prompt=ids,
        sampling=sampling,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
        prompt_logprobs_from=prompt_logprobs_from,
        tenant=caller.tenant.name,
        program=caller.program,
        plan=caller.plan,
    )


def _usage(tokens: int, cached: int) -> ScoreUsage:
    return ScoreUsage(
        prompt_tokens=tokens,
        total_tokens=tokens,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def _check_lengths(sequences: Sequence[Sequence[int]], most: int, param: str) -> None:
    for i, ids in enumerate(sequences):
        if len(ids) > most:
            raise PromptTooLong(
                f"The prompt and this one have {len(ids)} tokens together; they may have {most}.",
                param=f"{param}[{i}]",
                code="context_length_exceeded",
            )


def _given(body: ScoreRequest, names: Sequence[str]) -> list[str]:
    """Those of the fields that were sent."""
    values = {name: getattr(body, name) for name in names}
    return [
        name
        for name, value in values.items()
        if (given(value) if isinstance(value, msgspec.Raw) else value is not None)
    ]


def _refuse(body: ScoreRequest, names: Sequence[str], why: str) -> None:
    for name in _given(body, names):
        raise invalid_at(why, name)


ROUTES: Final = (
    Route(
        "POST",
        "/v1/score",
        score,
        Access.INFERENCE,
        "Score choices after a prompt, or labels after items",
        body=score_reader,
        reply=ChoiceScores | ItemScores,
        example={"prompt": "Is it?", "choices": [" yes", " no"]},
    ),
)
