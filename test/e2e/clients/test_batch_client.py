"""Files and batches by the official client, against real servers, one of which is killed."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.client("openai", "files and batches"),
]

CHAT: Any = "/v1/chat/completions"
OVER = {"completed", "failed", "cancelled", "expired"}
DOCUMENT = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def start(start_server: Callable[..., Any]) -> Callable[..., Any]:
    """A server with its files in a folder."""
    return lambda folder, *flags: start_server(
        "--kv-tokens", "16384", "--data-dir", str(folder), *flags
    )


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = start(tmp_path_factory.mktemp("data"))
    yield server
    assert server.stop() == 0


def line(name: str, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Say {name}."}],
        "temperature": 0,
        "max_tokens": 8,
        **fields,
    }
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def create(client: openai.OpenAI, lines: Iterable[Any], **fields: Any) -> Batch:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    asked = {"endpoint": CHAT, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **asked)


def wait(client: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool]) -> Batch:
    """Until something is true of it; the test's own timeout is the limit."""
    while not until(batch := client.batches.retrieve(batch.id)):
        time.sleep(0.1)
    return batch


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    return wait(client, batch, lambda b: b.status in OVER)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def results(client: openai.OpenAI, batch: Batch) -> dict[str, dict[str, Any]]:
    """The lines of both files by `custom_id`, of which none is there twice."""
    lines = [*lines_of(client, batch.output_file_id), *lines_of(client, batch.error_file_id)]
    assert max(Counter(one["custom_id"] for one in lines).values()) == 1
    return {one["custom_id"]: one for one in lines}


def test_files(client: openai.OpenAI) -> None:
    content = bytes(range(256)) * 100_000
    file = client.files.create(file=("a file.bin", content), purpose="user_data")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "a file.bin", "user_data")
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    client.files.wait_for_processing(file.id)
    more = [client.files.create(file=b"x", purpose="user_data") for _ in range(3)]
    listed = [one.id for one in client.files.list(purpose="user_data", limit=2)]
    assert listed == [one.id for one in [*more[::-1], file]]  # the client turns the pages
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.files.create(file=b"x", purpose="nothing")  # type: ignore[arg-type]
    assert error.value.param == "purpose"


def test_a_batch_says_what_its_requests_would_be_told(client: openai.OpenAI) -> None:
    lines = [line(f"w{i}") for i in range(12)]
    lines += [line("stream", stream=True), line("model", model="other")]
    schema = {"const": {"a": 1}}
    lines.append(line("json", json_schema=schema, max_tokens=40))
    batch = ended(client, create(client, lines, metadata={"for": "tea"}))
    assert batch.status == "completed"
    assert batch.metadata == {"for": "tea"}
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (15, 13, 2)
    found = results(client, batch)
    assert set(found) == {one["custom_id"] for one in lines}
    assert found["stream"]["response"]["status_code"] == 400
    assert found["model"]["response"]["body"]["error"]["code"] == "model_not_found"
    said = {
        name: one["response"]["body"]["choices"][0]["message"]["content"]
        for name, one in found.items()
        if one["response"]["status_code"] == 200
    }
    assert json.loads(said["json"]) == {"a": 1}
    for one in lines[:3]:
        alone = client.chat.completions.create(**one["body"])
        assert alone.choices[0].message.content == said[one["custom_id"]]
    assert batch.id in [one.id for one in client.batches.list(limit=2)]


def test_what_fails(client: openai.OpenAI) -> None:
    batch = ended(client, create(client, [line("a"), line("b"), line("a")]))
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data is not None
    assert [(e.line, e.code) for e in batch.errors.data] == [(3, "duplicate_custom_id")]
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        create(client, [line("a")], endpoint="/v1/moderations")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_cancel(client: openai.OpenAI, server: Any) -> None:
    lines = [line(f"w{i}", max_tokens=4000, ignore_eos=True) for i in range(50)]
    batch = create(client, lines)
    server.until(lambda: server.metric("phloem_num_requests_running") > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    server.until(lambda: server.metric("phloem_num_requests_running") == 0)
    found = results(client, batch)
    assert len(found) == 50
    assert {one["error"]["code"] for one in found.values()} == {"batch_cancelled"}


def test_who_waits_goes_first(
    start: Callable[..., Any], connect: Callable[[Any], openai.OpenAI], tmp_path: Path
) -> None:
    server = start(tmp_path, "--max-running", "2", "--batch-running", "2")
    client = connect(server)
    batch = create(client, [line(f"w{i}", max_tokens=4000, ignore_eos=True) for i in range(2)])
    server.until(lambda: server.metric("phloem_num_requests_running") == 2)
    reply = client.chat.completions.create(**line("now")["body"])
    assert reply.choices[0].message.content
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed == 0
    assert server.stop(signal.SIGTERM, 20) == 0  # less than the drain of those who wait may take


def test_a_killed_server_goes_on_where_it_was(
    start: Callable[..., Any], connect: Callable[[Any], openai.OpenAI], tmp_path: Path
) -> None:
    lines = [line(f"w{i}", max_tokens=16, ignore_eos=True) for i in range(60)]
    server = start(tmp_path)
    client = connect(server)
    batch = create(client, [*lines, line("bad", stream=True)])
    done = 0
    for at_least in (10, 30):
        batch = wait(client, batch, lambda b: b.request_counts.completed >= at_least)  # type: ignore[union-attr]  # noqa: B023
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = start(tmp_path)
        client = connect(server)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        done = at_least
    batch = ended(client, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (61, 60, 1)
    assert set(results(client, batch)) == {*(one["custom_id"] for one in lines), "bad"}
    assert server.metric("phloem_requests_total") <= 60 - done
    assert server.stop() == 0


def test_the_documents_program(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"## Files and batches\n\n```python\n(.*?)```", DOCUMENT, re.DOTALL)
    exec(program.replace("http://127.0.0.1:30000", server.url), {"__name__": "document"})
    printed = [json.loads(one) for one in capsys.readouterr().out.splitlines() if one]
    assert {one["custom_id"] for one in printed} == {"Oslo", "Rome"}
