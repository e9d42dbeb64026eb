"""Constraints over HTTP, end to end: reports, fields, lines, placing."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": r"^(.)\1$", "maxLength": 2},
        "size": {"enum": ["s", "m"]},
    },
    "required": ["code", "size"],
    "additionalProperties": False,
}
SMALL = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}


def complete(server: Any, **body: object) -> tuple[int, Any]:
    default = {"prompt": "Answer:", "max_tokens": 64, "temperature": 1.0, "seed": 3}
    status, reply = server.post("/v1/completions", {**default, **body})
    return status, reply


def schema(strict: bool) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict}}


def test_strict_refuses_and_not_strict_reports(server: Any) -> None:
    status, reply = complete(server, response_format=schema(strict=True))
    assert status == 400
    assert reply["error"]["param"].endswith("properties.code.pattern")
    for _ in range(2):  # found out, and known
        status, reply = complete(server, response_format=schema(strict=False), n=4)
        assert status == 200, reply
        report = reply["constraint"]
        assert report["enforcement"] == "partial"
        assert report["validated"] == ["/properties/code/pattern"]
        assert "/properties/code/maxLength" in report["enforced"]
        for choice in reply["choices"]:
            value = json.loads(choice["text"])
            code = value["code"]
            assert value["size"] in ("s", "m")
            assert len(code) <= 2
            assert choice["constraint_valid"] is (len(code) == 2 and code[0] == code[1])
        valid = [choice["constraint_valid"] for choice in reply["choices"]]
        assert report["valid"] is all(valid)


@pytest.mark.parametrize("pattern", ["\U00040000", "ab\U00040000"])
def test_what_the_vocabulary_cannot_write_is_the_constraints_fault(
    server: Any, pattern: str
) -> None:
    status, reply = complete(server, regex=pattern)
    assert status == 400, reply
    assert reply["error"]["code"] == "no_token_for_constraint"


@pytest.mark.parametrize("whitespace", ["compact", "bounded"])
def test_fields_put_together_are_the_answer(server: Any, whitespace: str) -> None:
    body = {
        "prompt": "Letters:",
        "json_schema": SMALL,
        "max_tokens": 40,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_fields": True},
        "constraint_whitespace": whitespace,
    }
    events = server.events("/v1/completions", body)
    text = "".join(c["text"] for e in events for c in e["choices"])
    fields = [f for e in events for c in e["choices"] for f in c.get("fields", [])]
    assert [f["path"] for f in fields] == [f"/{i}" for i in range(len(fields))]
    assert [f["value"] for f in fields] == json.loads(text)
    assert events[-1]["constraint"]["valid"] is True
    assert whitespace != "compact" or not set(text) & set(" \n")


def test_json_lines(server: Any) -> None:
    form = {"type": "json_lines", "schema": SMALL, "min_lines": 2, "max_lines": 3}
    _, reply = complete(server, response_format=form, max_tokens=100)
    lines = reply["choices"][0]["text"].split("\n")
    assert 2 <= len(lines) <= 3
    assert all(set(json.loads(line)) <= {"a", "b"} for line in lines)
    assert reply["constraint"] == {
        "kind": "json_lines",
        "enforcement": "full",
        "complete": True,
        "valid": True,
    }


def test_after_a_marker(server: Any) -> None:
    _, reply = complete(
        server, guided_choice=["yes", "no"], constraint_after="e", temperature=0, max_tokens=128
    )
    choice = reply["choices"][0]  # the marker is forced while there is room for the rest
    assert choice["finish_reason"] == "stop"
    assert choice["text"].partition("e")[2].strip("\n") in ("yes", "no")
    assert choice["constraint_valid"] is True


def test_a_cut_answer_is_flagged(server: Any) -> None:
    _, reply = complete(server, json_schema=SMALL, stop='"')
    assert reply["choices"][0]["matched_stop"] == '"'
    assert reply["constraint"]["complete"] is False
    assert "valid" not in reply["constraint"]
