"""Ollama's native API over the scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from phloem.constrained.spec import JsonObject, JsonSchema
from phloem.srt.errors import InvalidRequest, Unavailable
from phloem.srt.generation import Chunk, Finish, ReasoningMarks
from phloem.srt.http.ollama.answer import ChatAnswer, Stopwatch
from phloem.srt.http.tool_parser import Piece, Reasoning
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import FinishReason

MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def lines(reply: Any) -> list[dict[str, Any]]:
    assert reply.headers["Content-Type"] == "application/x-ndjson", reply.raw
    assert reply.raw.endswith("\n")
    return [json.loads(line) for line in reply.raw.splitlines()]


async def ask(api: Any, route: str, **body: Any) -> Any:
    return await api.call("POST", f"/api/{route}", {"model": "tiny", **body})


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole chat message that the lines of a stream make."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        said = part["message"]
        message["content"] += said["content"]
        if "tool_calls" in said:
            message.setdefault("tool_calls", []).extend(said["tool_calls"])
    return message


# ------------------------------------------------------------------ replies


async def test_generate_streams_unless_told_otherwise(api: Any) -> None:
    reply = await ask(api, "generate", prompt="Hi")
    parts = lines(reply)
    assert [part["response"] for part in parts] == ["Hel", "lo", " wor", "ld.", ""]
    assert [part["done"] for part in parts] == [False] * 4 + [True]
    assert all(set(part) == {"model", "created_at", "done", "response"} for part in parts[:-1])
    last = parts[-1]
    assert last["model"] == "tiny"
    assert last["done_reason"] == "stop"
    assert (last["prompt_eval_count"], last["eval_count"]) == (8, 4)
    parts_ns = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert last["total_duration"] == sum(last[name] for name in parts_ns)
    assert all(last[name] >= 0 for name in parts_ns)
    whole = (await ask(api, "generate", prompt="Hi", stream=False)).json
    assert whole["response"] == "Hello world."
    assert whole["context"] == last["context"] == [*b"<user>Hi", 0, 1, 2, 3]
    assert set(whole) == set(last)


async def test_chat_and_its_stream_are_the_same(api: Any, engine: Any) -> None:
    parts = lines(await ask(api, "chat", messages=MESSAGES))
    whole = (await ask(api, "chat", messages=MESSAGES, stream=False)).json
    assert joined(parts) == whole["message"] == {"role": "assistant", "content": "Hello world."}
    assert whole["done"] is True
    assert "context" not in whole
    assert parts[-1]["message"] == {"role": "assistant", "content": ""}
    assert engine.rendered[0]["messages"] == MESSAGES


async def test_the_name_comes_back_as_it_was_asked_for(api: Any) -> None:
    reply = await ask(api, "generate", model="tiny:latest", prompt="Hi", stream=False)
    assert reply.json["model"] == "tiny:latest"
    other = await ask(api, "generate", model="other", prompt="Hi")
    assert other.status == 404
    assert other.json == {"error": "model 'other' not found: 'tiny' is served here"}


async def test_the_system_prompt_stands_before_the_prompt(api: Any, engine: Any) -> None:
    await ask(api, "generate", prompt="Hi", system="Be brief.")
    roles = [message["role"] for message in engine.rendered[0]["messages"]]
    assert roles == ["system", "user"]


async def test_context_is_what_was_said_and_then_the_next_turn(api: Any, engine: Any) -> None:
    first = (await ask(api, "generate", prompt="Hi", stream=False)).json
    await ask(api, "generate", prompt="And you?", context=first["context"], stream=False)
    assert engine.requests[-1].prompt == [*first["context"], *b"<user>And you?"]


async def test_the_token_that_ended_an_answer_is_not_context(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda request: script(("a", ""), matched=1)
    whole = (await ask(api, "generate", prompt="Hi", stream=False)).json
    assert whole["context"] == [*b"<user>Hi", 0]
    assert whole["eval_count"] == 2


async def test_a_raw_prompt_has_no_template_and_no_context(api: Any, engine: Any) -> None:
    whole = (await ask(api, "generate", prompt="Once", raw=True, stream=False)).json
    assert engine.rendered == []
    assert engine.requests[0].prompt == list(b"Once")
    assert engine.requests[0].sampling.max_tokens == 512
    assert "context" not in whole
    for name, value in {"system": "x", "context": [1], "think": True, "suffix": "x"}.items():
        reply = await ask(api, "generate", prompt="Once", raw=True, **{name: value})
        assert reply.status == 400
        assert name in reply.json["error"]


async def test_a_suffix_is_filled_in_by_models_that_can(api: Any, engine: Any) -> None:
    refused = await ask(api, "generate", prompt="a", suffix="c")
    assert refused.status == 400
    assert "suffix" in refused.json["error"]
    engine.fills_in = True
    assert (await ask(api, "generate", prompt="a", suffix="c")).status == 200
    assert engine.requests[0].prompt == [1, *b"a", 2, *b"c", 3]
    assert engine.requests[0].sampling.stop_token_ids == (4,)


async def test_logprobs(api: Any) -> None:
    parts = lines(await ask(api, "generate", prompt="Hi", logprobs=True, top_logprobs=2))
    found = [entry for part in parts for entry in part.get("logprobs", [])]
    assert [entry["token"] for entry in found] == ["Hel", "lo", " wor", "ld."]
    assert found[0] == {
        "token": "Hel",
        "logprob": -0.5,
        "bytes": list(b"Hel"),
        "top_logprobs": [
            {"token": "Hel", "logprob": -0.5, "bytes": list(b"Hel")},
            {"token": "Hel1", "logprob": -1.5, "bytes": list(b"Hel")},
        ],
    }
    whole = (await ask(api, "chat", messages=MESSAGES, logprobs=True, stream=False)).json
    assert [entry["token"] for entry in whole["logprobs"]] == ["Hel", "lo", " wor", "ld."]
    assert all("top_logprobs" not in entry for entry in whole["logprobs"])
    for route, asked in (("generate", {"prompt": "Hi"}), ("chat", {"messages": MESSAGES})):
        reply = await ask(api, route, top_logprobs=2, **asked)
        assert reply.status == 400
        assert "top_logprobs" in reply.json["error"]


async def test_no_prompt_loads(api: Any, engine: Any) -> None:
    for route, asked, said in (
        ("generate", {}, ("response", "")),
        ("generate", {"prompt": ""}, ("response", "")),
        ("chat", {}, ("message", {"role": "assistant", "content": ""})),
        ("chat", {"messages": []}, ("message", {"role": "assistant", "content": ""})),
    ):
        loaded = (await ask(api, route, keep_alive="5m", **asked)).json
        assert loaded.pop("created_at")
        assert loaded == {"model": "tiny", "done": True, "done_reason": "load", said[0]: said[1]}
    assert engine.requests == []


@pytest.mark.parametrize("never", [0, "0", "0s", 0.0, "0h0m"])
async def test_the_model_cannot_be_unloaded(api: Any, never: object) -> None:
    reply = await ask(api, "generate", keep_alive=never)
    assert reply.status == 400
    assert "keep_alive" in reply.json["error"]
    # Behind a prompt it says what may become of the memory, which changes no answer.
    assert (await ask(api, "generate", prompt="Hi", keep_alive=never)).status == 200


async def test_loading_fails_when_the_backend_is_down(api: Any, engine: Any) -> None:
    engine.health_now = type(engine.health_now)(live=False, ready=False, reason="worker died")
    reply = await ask(api, "generate")
    assert (reply.status, reply.json) == (503, {"error": "worker died"})


# ------------------------------------------------------------------ tools and formats


async def test_tool_calls_have_objects_for_arguments(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(("Let me see. ", *CALL))
    asked = {"messages": MESSAGES, "tools": [WEATHER]}
    parts = lines(await ask(api, "chat", **asked))
    calls = [part["message"] for part in parts if "tool_calls" in part["message"]]
    assert len(calls) == 1
    (call,) = calls[0]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Bonn"}}
    assert parts[-1]["done_reason"] == "stop"
    whole = (await ask(api, "chat", stream=False, **asked)).json["message"]
    streamed = joined(parts)
    assert streamed["content"] == whole["content"] == "Let me see. "
    assert streamed["tool_calls"][0]["function"] == whole["tool_calls"][0]["function"]


async def test_a_call_that_was_cut_off_is_none(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script((CALL[:60],), finish=FinishReason.LENGTH)
    asked = {"messages": MESSAGES, "tools": [WEATHER]}
    whole = (await ask(api, "chat", stream=False, **asked)).json
    assert "tool_calls" not in whole["message"]
    assert whole["done_reason"] == "length"
    assert joined(lines(await ask(api, "chat", **asked))) == whole["message"]


def asking(*cities: str, **more: object) -> dict[str, object]:
    """The assistant asks for the weather in `cities`."""
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


@pytest.mark.parametrize("said_by", [{"tool_name": "weather"}, {"name": "weather"}, {}])
async def test_history_with_tools_is_rendered(
    api: Any, engine: Any, said_by: dict[str, str]
) -> None:
    history = [
        *MESSAGES,
        asking("Bonn", "Rome", thinking="Two towns."),
        {"role": "tool", "content": "rain", **said_by},
        {"role": "tool", "content": "sun", **said_by},
    ]
    assert (await ask(api, "chat", messages=history, tools=[WEATHER])).status == 200
    _, called, *said = engine.rendered[0]["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bonn"}}
    assert called["reasoning_content"] == "Two towns."
    assert [(one["role"], one["name"]) for one in said] == [("tool", "weather")] * 2
    ids = [call["id"] for call in called["tool_calls"]]
    assert [one["tool_call_id"] for one in said] == ids
    assert len(set(ids)) == 2
    assert engine.rendered[0]["tools"] == [WEATHER]


async def test_ids_of_the_client_are_kept(api: Any, engine: Any) -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": {}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert (await ask(api, "chat", messages=history)).status == 200
    _, called, said = engine.rendered[0]["messages"]
    assert called["tool_calls"][0]["id"] == said["tool_call_id"] == "c1"
    assert said["name"] == "weather"


async def test_format(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(("{", "}"))
    schema = {"type": "object", "additionalProperties": False}
    for route, asked in (("generate", {"prompt": "Hi"}), ("chat", {"messages": MESSAGES})):
        whole = (await ask(api, route, format="json", stream=False, **asked)).json
        assert whole["constraint"]["complete"] is True
        assert isinstance(engine.requests[-1].constraint, JsonObject)
        await ask(api, route, format=schema, **asked)
        assert isinstance(engine.requests[-1].constraint, JsonSchema)
        await ask(api, route, format="", **asked)
        assert engine.requests[-1].constraint is None
    bad = await ask(api, "generate", prompt="Hi", format="yaml")
    assert bad.status == 400
    assert "format" in bad.json["error"]


# ------------------------------------------------------------------ thinking


@pytest.fixture
def thinking_card(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model thinks, and its template has a switch for that, and efforts."""
    marks = ReasoningMarks(begin="<think>", end="</think>", switch="enable_thinking", efforts=True)
    card = msgspec.structs.replace(engine.card, reasoning=marks)
    monkeypatch.setattr(type(engine), "card", property(lambda self: card))


@pytest.mark.usefixtures("thinking_card")
@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
async def test_think_is_told_to_the_template(
    api: Any, engine: Any, think: object, variables: dict[str, object]
) -> None:
    for route, asked in (("generate", {"prompt": "Hi"}), ("chat", {"messages": MESSAGES})):
        assert (await ask(api, route, think=think, **asked)).status == 200
        assert engine.requests[-1].thoughts is not None
        assert engine.rendered[-1]["template_kwargs"].items() >= variables.items()
    shown = (await api.call("POST", "/api/show", {"model": "tiny"})).json
    assert "thinking" in shown["capabilities"]


async def test_a_model_that_does_not_think(api: Any) -> None:
    assert (await ask(api, "chat", messages=MESSAGES, think=False)).status == 200
    reply = await ask(api, "chat", messages=MESSAGES, think=True)
    assert reply.status == 400
    assert "think" in reply.json["error"]


class _Thinker:
    """Upper case is thought."""

    named = False

    def feed(self, text: str) -> list[Piece]:
        return [Reasoning(text) if text.isupper() else text] if text else []

    def finish(self) -> list[Piece]:
        return []


def test_thoughts_are_apart() -> None:
    finish = Finish(FinishReason.STOP)
    chunks = [
        Chunk(rid="r", text="HM"),
        Chunk(rid="r", text="yes", completion_tokens=2, finish=finish),
    ]
    whole, streamed = (ChatAnswer("tiny", _Thinker(), Stopwatch(), Warnings()) for _ in range(2))
    frames = [frame for chunk in chunks for frame in streamed.frames(0, chunk)]
    for chunk in chunks:
        whole.add(0, chunk)
    said = [msgspec.to_builtins(frame)["message"] for frame in (*frames, whole.whole())]
    assert said == [
        {"role": "assistant", "content": "", "thinking": "HM"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "yes", "thinking": "HM"},
    ]


# ------------------------------------------------------------------ embeddings


async def test_nothing_to_embed_loads(api: Any, engine: Any) -> None:
    nothings: list[dict[str, object]] = [{}, {"input": ""}, {"input": []}]
    for nothing in nothings:
        loaded = (await ask(api, "embed", **nothing)).json
        assert (loaded["model"], loaded["embeddings"]) == ("tiny", [])
    assert (await ask(api, "embeddings", prompt="")).json == {"embedding": []}
    assert engine.requests == []


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("embed", {"input": ["a", ""]}, "input[1]"),
        ("embed", {"input": "a", "dimensions": 3}, "dimensions"),
        ("embed", {"input": "a" * 513, "truncate": False}, "input"),
        ("embed", {"input": "a", "options": {"num_ctx": 100}}, "options.num_ctx"),
        ("embed", {"input": 1}, "input"),
        ("embeddings", {"prompt": ["a"]}, "prompt"),
        ("embeddings", {"prompt": "", "keep_alive": 0}, "keep_alive"),
    ],
)
async def test_embeddings_that_are_refused(
    api: Any, engine: Any, route: str, body: dict[str, object], named: str
) -> None:
    reply = await ask(api, route, **body)
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert named in reply.json["error"]
    assert engine.requests == []


# ------------------------------------------------------------------ options


async def test_ollamas_defaults(api: Any, engine: Any) -> None:
    await ask(api, "chat", messages=MESSAGES)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
    assert sampling.repetition_penalty == 1.1
    assert (sampling.max_tokens, sampling.seed, sampling.min_p) == (None, None, 0)


async def test_options_reach_the_engine(api: Any, engine: Any) -> None:
    options = {
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "num_predict": 2,
        "repeat_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["END"],
        "num_thread": 4,
        "num_gpu": 0,
        "typical_p": 1.0,
        "mirostat": 0,
    }
    for route, asked in (
        ("chat", {"messages": MESSAGES}),
        ("generate", {"prompt": "Hi"}),
        ("generate", {"prompt": "Hi", "raw": True}),
    ):
        whole = (await ask(api, route, options=options, stream=False, **asked)).json
        assert whole["done_reason"] == "length"
        request = engine.requests[-1]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 3, 0.5)
        assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 7, 2)
        assert sampling.repetition_penalty == 1.3
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert request.stop == ("END",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_predict": -1}, None),
        ({"num_predict": -2}, None),
        ({"num_ctx": 20}, 12),
        ({"num_ctx": 20, "num_predict": 5}, 5),
        ({"num_ctx": 12, "num_predict": 5}, 4),
        ({"num_ctx": 512, "num_predict": -1}, 504),
    ],
)
async def test_bounds_of_the_output(
    api: Any, engine: Any, options: dict[str, int], expected: int | None
) -> None:
    await ask(api, "generate", prompt="Hi", options=options)
    assert engine.requests[0].sampling.max_tokens == expected


async def test_windows_of_penalties(api: Any, engine: Any) -> None:
    for options, penalty in (
        ({"repeat_last_n": -1}, 1.1),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5}, 1.0),
        ({"repeat_last_n": 64, "repeat_penalty": 1}, 1.0),
    ):
        await ask(api, "generate", prompt="Hi", options=options)
        assert engine.requests[-1].sampling.repetition_penalty == penalty
    reply = await ask(api, "generate", prompt="Hi", options={"repeat_last_n": 64})
    assert reply.status == 400
    assert "options.repeat_last_n" in reply.json["error"]


async def test_a_seed_of_minus_one_is_none(api: Any, engine: Any) -> None:
    await ask(api, "generate", prompt="Hi", options={"seed": -1})
    assert engine.requests[0].sampling.seed is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("num_ctx", 513),
        ("num_ctx", 8),
        ("num_predict", 0),
        ("stop", [""]),
        ("mirostat", 2),
        ("typical_p", 0.5),
        ("tfs_z", 0.5),
        ("penalize_newline", False),
        ("temprature", 1),
    ],
)
async def test_options_that_are_refused(api: Any, engine: Any, name: str, value: object) -> None:
    reply = await ask(api, "generate", prompt="Hi", options={name: value})
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert f"options.{name}" in reply.json["error"]
    assert engine.requests == []


async def test_what_was_not_done_is_said(api: Any) -> None:
    body = {"prompt": "Hi", "options": {"num_predict": 600, "num_ctx": 100}, "colour": "red"}
    for whole in (
        (await ask(api, "generate", stream=False, **body)).json,
        lines(await ask(api, "generate", **body))[-1],
    ):
        assert [one["param"] for one in whole["warnings"]] == ["colour", "options.num_predict"]
        assert "taken for 92" in whole["warnings"][1]["message"]
    assert "warnings" not in (await ask(api, "generate", prompt="Hi", stream=False)).json


# ------------------------------------------------------------------ refusals and errors


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "Hi", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "Hi", "shift": True}, "shift"),
        ("generate", {"prompt": "Hi", "keep_alive": "soon"}, "keep_alive"),
        ("generate", {"prompt": "Hi", "think": "hard"}, "think"),
        ("generate", {"prompt": "Hi", "context": [1000]}, "context[0]"),
        ("generate", {"prompt": ["Hi"]}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": MESSAGES, "guided_regex": "a"}, "guided_regex"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        (
            "chat",
            {"messages": [{"role": "tool", "tool_name": "f", "content": "x"}]},
            "messages[0].tool_name",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "thinking": "x", "content": "x"}]},
            "messages[0].thinking",
        ),
        (
            "chat",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_refusals_name_the_field(
    api: Any, engine: Any, route: str, body: dict[str, object], named: str
) -> None:
    reply = await ask(api, route, **body)
    assert reply.status == 400
    assert set(reply.json) == {"error"}
    assert named in reply.json["error"]
    assert engine.requests == []


async def test_a_refusal_of_the_engine_has_the_clients_name(
    api: Any, engine: Any, script: Any
) -> None:
    refusal = InvalidRequest("too few tokens", param="max_tokens")
    engine.script = lambda request: script(refusal=refusal)
    reply = await ask(api, "chat", messages=MESSAGES)
    assert (reply.status, reply.json) == (400, {"error": "options.num_predict: too few tokens"})


async def test_an_error_in_a_stream_is_a_line(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(failure=Unavailable("the worker died"))
    parts = lines(await ask(api, "generate", prompt="Hi"))
    assert "".join(part["response"] for part in parts[:-1]) == "Hello world."
    assert parts[-1] == {"error": "the worker died"}


async def test_a_client_that_leaves_ends_its_request(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda request: script(hold=hold)
    body = json.dumps({"prompt": "Hi"}).encode()
    headers = {"Content-Type": "application/json"}
    url = f"{api.base}/api/generate"
    async with api.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200
    await eventually(lambda: len(engine.closed) == 1)


async def test_keys_are_asked_for(serve: Any) -> None:
    api = await serve(api_key="secret")
    for method, path in (("POST", "/api/chat"), ("GET", "/api/tags"), ("POST", "/api/pull")):
        reply = await api.call(method, path, {} if method == "POST" else None)
        assert reply.status == 401
        assert set(reply.json) == {"error"}
