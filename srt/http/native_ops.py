"""Native routes beside `/generate`: does it really generate, how busy is it, and the parsers that
chat answers go through, for who generates by `/generate`.
"""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from phloem.srt.errors import PhloemError
from phloem.srt.generation import Chunk, Finish, GenerateRequest, ReasoningMarks
from phloem.srt.http.body import BodyReader, read_query, unsupported
from phloem.srt.http.choice import Choice
from phloem.srt.http.context import serving
from phloem.srt.http.ops import HealthReply, HealthStatus, health_response, package_version
from phloem.srt.http.protocol import ToolSpec
from phloem.srt.http.reasoning import ReasoningParser, ReasoningPlan
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.tool_formats import FORMATS
from phloem.srt.http.tool_parser import AnswerParser, CallsParser, TextParser
from phloem.srt.messages import FinishReason, SamplingParams

HEALTH_SECONDS: Final = 20.0
"""A server that gives no token within this is not healthy."""

_TOOL_PARSERS: Final = {**{name: name for name in FORMATS}, "qwen": "hermes", "qwen25": "hermes"}
_THINK: Final = ReasoningMarks(begin="<think>", end="</think>")
_REASONING_PARSERS: Final = ("deepseek-r1", "qwen3", "qwen3-thinking")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Of one scheduler. Tokens are KV slots; what is cached and could be evicted is not used."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float


class TotalLoad(msgspec.Struct, frozen=True, kw_only=True):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class LoadsReply(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: str
    version: str
    dp_rank_count: int = 1
    loads: list[Load]
    aggregate: TotalLoad


class LoadsQuery(msgspec.Struct, kw_only=True):
    format: Literal["json"] | None = None
    dp_rank: Annotated[int, Meta(ge=0, le=0)] | None = None


class ParseCallsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    tools: list[ToolSpec]
    tool_call_parser: str | None = None


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_index` counts in the request's `tools`, -1 for one that is not among them;
    `parameters` is JSON text."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct, frozen=True):
    normal_text: str
    calls: list[ParsedCall]


class SeparateReasoningRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: str
    reasoning_parser: str | None = None


class SeparatedReasoning(msgspec.Struct, frozen=True):
    reasoning_text: str
    text: str


class AppendRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    src_rids: list[str]
    dst_rid: str


class AppendReply(msgspec.Struct, frozen=True, kw_only=True):
    appended_tokens: Literal[0] = 0
    message: str = (
        "Nothing is appended ahead of time: the next request sends the whole text, and what of it "
        "is in the cache is taken from there."
    )


_append_reader = BodyReader(AppendRequest)
_calls_reader = BodyReader(ParseCallsRequest)
_reasoning_reader = BodyReader(SeparateReasoningRequest)


async def health_generate(request: web.Request) -> web.Response:
    """One token, by the whole way that a request takes: 503 with the reason if it does not come."""
    engine = serving(request).engine
    state, reason = engine.health(), ""
    probe = GenerateRequest(
        prompt="Hi",
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        deadline_s=HEALTH_SECONDS,
    )
    try:
        async with aclosing(engine.generate(probe)) as chunks:  # type: ignore[type-var]
            async for _ in chunks:
                continue
    except PhloemError as error:
        reason = error.message
    status: HealthStatus = "unhealthy" if reason else "ok"
    return health_response(state, status, reason, good=not reason)


async def loads(request: web.Request) -> web.Response:
    read_query(request, LoadsQuery)
    engine = serving(request).engine
    stats, slots = engine.stats, engine.card.kv_slots
    used = stats.kv_locked + stats.kv_private
    waiting = stats.waiting + stats.compiling
    load = Load(
        num_running_reqs=stats.running,
        num_waiting_reqs=waiting,
        num_used_tokens=used,
        max_total_num_tokens=slots,
        token_usage=used / slots,
        cache_hit_rate=stats.cached_tokens_total / max(1, stats.prompt_tokens_total),
    )
    total = TotalLoad(
        total_running_reqs=stats.running,
        total_waiting_reqs=waiting,
        total_reqs=stats.running + waiting,
        avg_token_usage=load.token_usage,
    )
    now = datetime.now(UTC).isoformat()
    return json_response(
        LoadsReply(timestamp=now, version=package_version(), loads=[load], aggregate=total)
    )


async def concate_and_append(request: web.Request) -> web.Response:
    """SGLang's frontend announces with this that texts of forks will follow each other in one. It
    sends that text itself, so there is nothing to be done; the reply says so."""
    await _append_reader.read(request)
    return json_response(AppendReply())


async def parse_function_call(request: web.Request) -> web.Response:
    """The calls in a text, as a chat answer would have them."""
    body = await _calls_reader.read(request)
    asked = body.tool_call_parser
    name: str | None = serving(request).engine.card.tool_format
    if asked is not None:
        name = _TOOL_PARSERS.get(asked)
    if name is None:
        raise unsupported("tool_call_parser", f"known are {', '.join(_TOOL_PARSERS)}")
    read = _read(CallsParser(FORMATS[name].syntax), body.text)
    names = [tool.function.name for tool in body.tools]
    return json_response(
        ParsedCalls(
            read.content,
            [
                ParsedCall(
                    tool_index=names.index(start.name) if start.name in names else -1,
                    name=start.name,
                    parameters=arguments,
                )
                for start, arguments in read.calls
            ],
        )
    )


async def separate_reasoning(request: web.Request) -> web.Response:
    """What was thought in a text, apart from the answer."""
    body = await _reasoning_reader.read(request)
    marks = serving(request).engine.card.reasoning
    if body.reasoning_parser is not None:
        if body.reasoning_parser not in _REASONING_PARSERS:
            raise unsupported("reasoning_parser", f"known are {', '.join(_REASONING_PARSERS)}")
        marks = _THINK
    if marks is None:
        raise unsupported("reasoning_parser", "this model does not reason; name a parser")
    # A text that ends its reasoning without beginning it began inside, behind the prompt's mark.
    opened = marks.begin not in body.text and marks.end in body.text
    read = _read(ReasoningParser(TextParser(), ReasoningPlan(marks, opened)), body.text)
    return json_response(SeparatedReasoning(read.reasoning, read.content))


def _read(parser: AnswerParser, text: str) -> Choice:
    """A whole text, read as an answer."""
    choice = Choice(0, parser)
    choice.add(Chunk(rid="", text=text, finish=Finish(FinishReason.STOP)))
    return choice


ROUTES: Final = (
    Route(
        "POST",
        "/concate_and_append_request",
        concate_and_append,
        Access.INFERENCE,
        "What SGLang's frontend says before it joins forks",
        body=_append_reader,
        reply=AppendReply,
        example={"src_rids": ["a", "b"], "dst_rid": "c"},
    ),
    Route(
        "GET",
        "/health_generate",
        health_generate,
        Access.KEY,
        "Whether a token is really generated",
        reply=HealthReply,
        error=HealthReply,
    ),
    Route(
        "GET", "/v1/loads", loads, Access.KEY, "How busy it is", query=LoadsQuery, reply=LoadsReply
    ),
    Route(
        "POST",
        "/parse_function_call",
        parse_function_call,
        Access.INFERENCE,
        "The tool calls in a text",
        body=_calls_reader,
        reply=ParsedCalls,
        example={"text": "No call.", "tools": []},
    ),
    Route(
        "POST",
        "/separate_reasoning",
        separate_reasoning,
        Access.INFERENCE,
        "The reasoning in a text, apart from the answer",
        body=_reasoning_reader,
        reply=SeparatedReasoning,
        example={"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"},
    ),
)
