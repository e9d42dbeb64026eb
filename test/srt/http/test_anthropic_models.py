"""The served models as Anthropic's API has them, for requests that say `anthropic-version`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.anthropic.models import ModelInfo, ModelQuery, model_page

VERSION = {"anthropic-version": "2023-06-01"}


async def get(api: Any, path: str = "", **query: object) -> Any:
    asked = f"?{urlencode(query, doseq=True)}" if query else ""
    return await api.call("GET", f"/v1/models{path}{asked}", headers=VERSION)


async def test_a_model(api: Any) -> None:
    reply = await get(api, "/tiny")
    assert reply.json == {
        "type": "model",
        "id": "tiny",
        "display_name": "tiny",
        "created_at": "1970-01-01T00:00:01Z",
        "lifecycle": "active",
        "max_input_tokens": 512,
        "max_tokens": 512,
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }
    assert reply.headers["request-id"] == reply.headers["X-Request-Id"]


async def test_the_list(api: Any) -> None:
    reply = await get(api)
    assert reply.json == {
        "data": [(await get(api, "/tiny")).json],
        "has_more": False,
        "first_id": "tiny",
        "last_id": "tiny",
    }
    nothing = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    for query in ({"after_id": "tiny"}, {"before_id": "tiny"}, {"lifecycle[]": "retired"}):
        assert (await get(api, **query)).json == nothing
    for stages in ({"lifecycle[]": ["retired", "active"]}, {"lifecycle": "active"}, {"limit": 1}):
        assert (await get(api, **stages)).json == reply.json


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"after_id": "other"}, "after_id"),
        ({"before_id": "other"}, "before_id"),
        ({"after_id": "tiny", "before_id": "tiny"}, "before_id"),
        ({"lifecycle[]": "young"}, "lifecycle[0]"),
    ],
)
async def test_what_is_asked_wrongly_is_an_error_in_its_shape(
    api: Any, query: dict[str, Any], param: str
) -> None:
    reply = await get(api, **query)
    assert (reply.status, reply.json["type"]) == (400, "error")
    error = reply.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert reply.json["request_id"] == reply.headers["request-id"]


async def test_a_model_that_is_not_served(api: Any) -> None:
    reply = await get(api, "/other")
    assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")
    for path in ("/v1/models", "/v1/models/tiny"):  # without the header, all is as OpenAI has it
        plain = await api.call("GET", path)
        assert "object" in plain.json
        assert "request-id" not in plain.headers
    other = await api.call("GET", "/v1/models/other")
    assert set(other.json) == {"error"}
    elsewhere = await api.call("GET", "/v1/modelsx", headers=VERSION)
    assert set(elsewhere.json) == {"error"}


async def test_a_key_that_is_missing_is_told_in_its_shape(serve: Any) -> None:
    api = await serve(api_key="k-1")
    reply = await get(api)
    assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
    right = await api.call("GET", "/v1/models", headers=VERSION | {"x-api-key": "k-1"})
    assert right.status == 200


# ----------------------------------------------------------------------- pages


MODELS = [
    ModelInfo(id=id_, display_name=id_, created_at="", max_input_tokens=1, max_tokens=1)
    for id_ in "abcde"
]


def page(**query: Any) -> tuple[str, bool]:
    found = model_page(MODELS, ModelQuery(**query))
    ids = "".join(model.id for model in found.data)
    assert (found.first_id, found.last_id) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, found.has_more


def test_pages_go_either_way() -> None:
    assert page() == ("abcde", False)
    assert page(limit=2) == ("ab", True)
    assert page(limit=2, after_id="b") == ("cd", True)
    assert page(limit=2, after_id="d") == ("e", False)
    assert page(limit=2, before_id="e") == ("cd", True)
    assert page(limit=2, before_id="c") == ("ab", False)
    with pytest.raises(InvalidRequest):
        page(after_id="x")
