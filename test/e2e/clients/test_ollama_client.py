"""The official `ollama` client, unmodified, against a real server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import ollama
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.e2e, pytest.mark.model]

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = b"GGUF" + bytes(range(256)) * 5000
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 16}


@pytest.fixture
def client(server: Any) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.client("ollama", "generate, streamed and whole")
def test_generate(client: ollama.Client) -> None:
    whole = client.generate("tiny", "Name three colours.", options=GREEDY)
    parts = list(client.generate("tiny", "Name three colours.", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert whole.context == parts[-1].context
    assert whole.eval_count == 16
    assert whole.done_reason == "length"
    assert whole.eval_duration
    assert whole.total_duration
    assert whole.total_duration >= whole.eval_duration


@pytest.mark.client("ollama", "context")
def test_context_goes_on_as_the_chat_does(client: ollama.Client) -> None:
    first = client.generate("tiny", "My name is Ada.", options={"temperature": 0})
    assert first.done_reason == "stop"
    second = client.generate(
        "tiny", "What is my name?", context=first.context, options={**GREEDY, "repeat_penalty": 1}
    )
    chat = client.chat(
        "tiny",
        [
            *user("My name is Ada."),
            {"role": "assistant", "content": first.response},
            *user("What is my name?"),
        ],
        options={**GREEDY, "repeat_penalty": 1},
    )
    assert second.response == chat.message.content
    assert second.prompt_eval_count == chat.prompt_eval_count


@pytest.mark.client("ollama", "chat, streamed and whole")
def test_chat(client: ollama.Client) -> None:
    whole = client.chat("tiny", user("Name three colours."), options=GREEDY)
    parts = list(client.chat("tiny", user("Name three colours."), options=GREEDY, stream=True))
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    # The same prompt through the other route, whose template it is, too.
    generated = client.generate("tiny", "Name three colours.", options=GREEDY)
    assert generated.response == whole.message.content
    assert generated.prompt_eval_count == whole.prompt_eval_count


@pytest.mark.client("ollama", "async client")
async def test_async(server: Any) -> None:
    async with ollama.AsyncClient(host=server.url) as client:
        whole, streamed = await asyncio.gather(
            client.chat("tiny:latest", user("Hi"), options=GREEDY),
            client.generate("tiny:latest", "Hi", options=GREEDY, stream=True),
        )
        text = "".join([part.response or "" async for part in streamed])
    assert whole.message.content == text
    assert whole.model == "tiny:latest"


class City(BaseModel):
    name: Literal["Paris", "Rome", "Oslo"]
    founded: int
    coast: bool


@pytest.mark.client("ollama", "format: a pydantic schema, json")
def test_format(client: ollama.Client) -> None:
    asked = user("Tell me of a city, in JSON.")
    options = {"num_predict": 64, "seed": 1}
    reply = client.chat("tiny", asked, format=City.model_json_schema(), options=options)
    City.model_validate_json(reply.message.content or "")
    schema = City.model_json_schema()
    parts = client.generate("tiny", "A city.", format=schema, options=options, stream=True)
    City.model_validate_json("".join(part.response or "" for part in parts))
    free = client.generate("tiny", "A city, in JSON.", format="json", options=options)
    assert isinstance(json.loads(free.response or ""), dict)


@pytest.mark.client("ollama", "tools, from a Python function")
def test_tools(client: ollama.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number
            b: The second number
        """
        return a + b

    asked = user("What is 3 plus 4? Use the tool.")
    options = {"temperature": 0, "num_predict": 48}
    reply = client.chat("tiny", asked, tools=[add], options=options)
    parts = list(client.chat("tiny", asked, tools=[add], options=options, stream=True))
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    whole = list(reply.message.tool_calls or [])
    assert [call.function for call in streamed] == [call.function for call in whole]
    for call in whole:
        assert set(call.function.arguments) == {"a", "b"}
        assert isinstance(add(**call.function.arguments), int)
    # The result goes back as the client's documentation has it.
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 3, "b": 4})
    )
    again = client.chat(
        "tiny",
        [
            *asked,
            ollama.Message(role="assistant", tool_calls=[call]),
            {"role": "tool", "content": "7", "tool_name": "add"},
        ],
        tools=[add],
        options=GREEDY,
    )
    assert again.prompt_eval_count
    assert reply.prompt_eval_count
    assert again.prompt_eval_count > reply.prompt_eval_count


@pytest.mark.client("ollama", "logprobs")
def test_logprobs(client: ollama.Client) -> None:
    reply = client.generate("tiny", "Hi", logprobs=True, top_logprobs=3, options=GREEDY)
    assert reply.logprobs is not None
    assert len(reply.logprobs) == reply.eval_count
    assert all(len(entry.top_logprobs or []) == 3 for entry in reply.logprobs)


@pytest.mark.client("ollama", "list, ps, show")
def test_models(client: ollama.Client) -> None:
    served = client.list().models[0]
    assert served.model == "tiny:latest"
    assert served.details is not None
    assert (served.details.format, served.details.family) == ("gguf", "llama")
    assert (served.details.parameter_size, served.details.quantization_level) == ("134.5M", "Q4_1")
    (running,) = client.ps().models
    assert running.model == served.model
    assert running.size == served.size
    assert running.expires_at is not None
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == running.context_length
    assert "completion" in (shown.capabilities or [])
    assert "<|im_start|>" in (shown.template or "")


@pytest.mark.client("ollama", "embed, embeddings")
def test_embed(client: ollama.Client) -> None:
    reply = client.embed("tiny", ["The sky is blue.", "The sky is blue.", "Add two eggs."])
    first, same, other = reply.embeddings
    assert first == same != other
    assert math.isclose(math.hypot(*first), 1, abs_tol=1e-5)
    assert reply.prompt_eval_count
    alone = client.embed("tiny", "The sky is blue.").embeddings
    assert alone == [first]
    raw = client.embeddings("tiny", "The sky is blue.").embedding
    length = math.hypot(*raw)
    assert [x / length for x in raw] == pytest.approx(first, abs=1e-5)


@pytest.mark.client("ollama", "errors")
def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.generate("other", "Hi")
    assert unknown.value.status_code == 404
    assert "not found" in unknown.value.error
    with pytest.raises(ollama.ResponseError) as refused:
        list(client.chat("tiny", user("Hi"), options={"mirostat": 1}, stream=True))
    assert refused.value.status_code == 400
    assert "options.mirostat" in refused.value.error
    with pytest.raises(ollama.ResponseError) as schema:
        client.chat("tiny", user("Hi"), format={"type": "no such type"})
    assert schema.value.status_code == 400
    assert "format" in schema.value.error
    with pytest.raises(ollama.ResponseError) as served:
        client.delete("tiny")
    assert served.value.status_code == 409


class _Hub(BaseHTTPRequestHandler):
    """What a pull asks of a Hugging Face hub, for one repository with one file."""

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}
        status, data = 200, WEIGHTS
        if path == "/api/models/org/name/revision/main":
            lfs = {"sha256": digest, "size": len(WEIGHTS), "pointerSize": 134}
            file = {"rfilename": "a.gguf", "size": len(WEIGHTS), "blobId": "1", "lfs": lfs}
            data = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": [file]}).encode()
            headers["Content-Type"] = "application/json"
        elif path != f"/org/name/resolve/{COMMIT}/a.gguf":
            status, data, headers = 404, b"", {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.client("ollama", "pull with progress, delete")
def test_pull_and_delete(
    hub: str,
    start_server: Callable[..., Any],
    default_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path / "home"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    server = start_server("--kv-tokens", "2048", model=default_model)
    try:
        with ollama.Client(host=server.url) as client:
            lines = list(client.pull("hf.co/org/name", stream=True))
            said = [line.status for line in lines]
            assert said[0] == "pulling manifest"
            assert said[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
            bars = [line for line in lines if line.digest is not None]
            digest = hashlib.sha256(WEIGHTS).hexdigest()
            assert {(bar.digest, bar.total) for bar in bars} == {(f"sha256:{digest}", len(WEIGHTS))}
            counts = [bar.completed or 0 for bar in bars]
            assert counts == sorted(counts)
            assert counts[-1] == len(WEIGHTS)
            pulled = {model.model: model for model in client.list().models}["org/name:latest"]
            assert (pulled.digest, pulled.size) == (digest, len(WEIGHTS))
            assert client.pull("org/name").status == "success"
            assert client.delete("org/name:latest").status == "success"
            assert [model.model for model in client.list().models] == ["tiny:latest"]
            with pytest.raises(ollama.ResponseError) as unknown:
                client.pull("org/nothing")
            assert unknown.value.status_code == 404
    finally:
        server.stop()
