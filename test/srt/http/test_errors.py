"""Every failure is one envelope with the right status, and says which field is at fault."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from phloem.srt.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    NotFound,
    PhloemError,
    PromptTooLong,
    QueueFull,
    Unavailable,
)

CHAT = "/v1/chat/completions"


def check(reply: Any, status: int) -> dict[str, Any]:
    """The envelope: exactly four keys under `error`, a message, no traces of Python."""
    assert reply.status == status, reply.raw
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.headers["X-Request-Id"]
    assert set(reply.json) == {"error"}
    error: dict[str, Any] = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].strip()
    assert error["type"]
    for leak in ("Traceback", "object at 0x", "site-packages", ".py"):
        assert leak not in reply.raw
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("no", param="x", code="c"), 400, "invalid_request_error", "c"),
        (InvalidConstraint("no"), 400, "invalid_request_error", None),
        (PromptTooLong("600 > 512"), 400, "invalid_request_error", None),
        (NotFound("no"), 404, "not_found_error", "not_found"),
        (QueueFull("full", retry_after=2.3), 429, "rate_limit_error", "queue_full"),
        (InternalError("no"), 500, "server_error", "internal_error"),
        (Unavailable("starting"), 503, "unavailable_error", "unavailable"),
        (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_engine_errors_before_the_first_chunk_are_the_status(
    api: Any,
    engine: Any,
    script: Any,
    error: PhloemError,
    status: int,
    kind: str,
    code: str | None,
    stream: bool,
    n: int,
) -> None:
    engine.script = lambda r: script(refusal=error) if r.rid.endswith(("0", "t")) else script()
    reply = await api.chat(stream=stream, n=n, rid="t")
    body = check(reply, status)
    assert (body["type"], body["code"], body["message"]) == (kind, code, error.message)
    if isinstance(error, QueueFull):
        assert reply.headers["Retry-After"] == "3"
    if isinstance(error, Unavailable):
        assert reply.headers["Retry-After"] == "1"
    assert not engine.running
    for path, request in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
        other = await api.call("POST", path, {**request, "stream": stream, "rid": "t"})
        assert check(other, status) == body


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Unavailable("the worker died"), "unavailable_error"), (ValueError("oops"), "server_error")],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_errors_after_the_200_are_a_frame_and_done(
    api: Any, engine: Any, script: Any, error: Exception, kind: str, n: int
) -> None:
    engine.script = lambda r: script(["a"], failure=error)
    events = (await api.chat(stream=True, n=n, rid="t")).events
    assert events[-1]["error"]["type"] == kind
    assert "oops" not in str(events[-1])
    assert sum("error" in e for e in events) == 1
    assert not engine.running
    whole = check(await api.chat(n=n, rid="t"), 500 if kind == "server_error" else 503)
    assert whole["type"] == kind
    native = (await api.generate(text="a", stream=True)).events
    assert native[-1]["error"]["type"] == kind


async def test_one_failing_choice_ends_the_others(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    never = asyncio.Event()
    engine.script = lambda r: (
        script(["a"], failure=Unavailable("gone")) if r.rid == "t-1" else script(hold=never)
    )
    check(await api.chat(n=3, rid="t"), 503)
    await eventually(lambda: not engine.running)
    assert sorted(engine.closed) == ["t-0", "t-2"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": ',
        b"",
        b"[1, 2]",
        b"42",
        b"null",
        b'"text"',
        b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"x": "\xff", "messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}]} x',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "unknown": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "n": 2}',
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/tokenize", "/abort"])
async def test_bodies_that_are_not_json(api: Any, engine: Any, raw: bytes, path: str) -> None:
    check(await api.call("POST", path, raw=raw), 400)
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": -7}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [1000]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"999999999": 5}}, "logit_bias.999999999"),
        ({"logit_bias": {"-3": 5}}, "logit_bias.-3"),
        ({"logit_bias": {"abc": 5}}, "logit_bias.abc"),
        ({"logit_bias": {"1_0": 5}}, "logit_bias.1_0"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"timeout": 0}, "timeout"),
        ({"rid": "a b"}, "rid"),
        ({"rid": ""}, "rid"),
        ({"priority": 2**40}, "priority"),
        ({"echo": True}, "echo"),
        ({"bad_words": ["x", ""]}, "bad_words[1]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": ["a", "b*"]}, "stop_regex[1]"),
        ({"allowed_token_ids": [5, 1000]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["x"], "regex": "a"}, "bad_words"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "up"}, "truncation_side"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"store": "yes"}, "store"),
        ({"metadata": "x"}, "metadata"),
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"lora_path": "x"}, "lora_path"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
async def test_fields_out_of_range(
    api: Any, engine: Any, body: dict[str, object], param: str
) -> None:
    error = check(await api.chat(**body), 400)
    assert error["param"] == param
    assert check(await api.chat(**{"stream": True, **body}), 400)["param"] == param
    assert not engine.requests


async def test_the_wrong_model_is_a_404(api: Any) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        error = check(await api.call("POST", path, {**body, "model": "other"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    check(await api.call("GET", "/v1/models/other"), 404)


async def test_unknown_routes_and_methods(api: Any) -> None:
    assert check(await api.call("GET", "/nope"), 404)["code"] == "unknown_route"
    reply = await api.call("GET", CHAT)
    assert check(reply, 405)["code"] == "method_not_allowed"
    assert reply.headers["Allow"] == "POST"


async def test_bodies_beyond_the_limit(serve: Any) -> None:
    api = await serve(max_body_bytes=1000)
    error = check(await api.chat(messages=[{"role": "user", "content": "a" * 2000}]), 413)
    assert error["code"] == "payload_too_large"
    assert (await api.chat()).status == 200


async def test_only_json_is_read(api: Any) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a"}]}'
    for kind in ("text/plain", "multipart/form-data"):
        reply = await api.call("POST", CHAT, raw=raw, headers={"Content-Type": kind})
        check(reply, 415)
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        reply = await api.call("POST", CHAT, raw=raw, headers={"Content-Type": kind})
        assert reply.status == 200


@pytest.mark.parametrize("page", [{}, {"Origin": "http://x"}, {"Sec-Fetch-Site": "cross-site"}])
async def test_what_curl_calls_a_form_is_read_unless_a_page_sends_it(
    api: Any, page: dict[str, str]
) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a"}]}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = await api.call("POST", CHAT, raw=raw, headers={**form, **page})
    if page:
        check(reply, 415)
    else:
        assert reply.status == 200


async def test_faults_of_ours_say_nothing_of_the_inside(
    api: Any, engine: Any, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = lambda r: script(refusal=RuntimeError("secret"))
    reply = await api.chat()
    assert "secret" not in reply.raw
    check(reply, 500)
    assert "secret" in caplog.text
    assert reply.headers["X-Request-Id"] in caplog.text


async def test_an_id_in_use_is_refused(api: Any, engine: Any, script: Any, eventually: Any) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    first = asyncio.create_task(api.chat(rid="same"))
    await eventually(lambda: "same" in engine.running)
    error = check(await api.chat(rid="same"), 400)
    assert (error["param"], error["code"]) == ("rid", "duplicate_request_id")
    hold.set()
    assert (await first).status == 200
    assert (await api.chat(rid="same")).status == 200
