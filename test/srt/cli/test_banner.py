"""The banner: what it says, and that the lines to try are whole."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest

from phloem.srt.cli.banner import render_banner
from phloem.srt.config import ServeConfig
from phloem.srt.generation import ModelCard
from phloem.srt.resolve import Hardware, Resolved

CARD = ModelCard(
    name="tiny",
    path="/models/tiny.Q4_1.gguf",
    format="gguf Q4_1",
    architecture="llama",
    created=0,
    vocab_size=100,
    context_length=8192,
    kv_slots=120_261,
    embedding_length=64,
)
STARTUP = {"import": 1.04, "weights": 0.86, "tokenizer": 0.001, "total": 2.31}


HARDWARE = Hardware(
    cpu="A CPU",
    flags=frozenset(),
    logical_cpus=2,
    affinity=2,
    quota=None,
    memory_total=0,
    memory_free=0,
)
RESOLVED = Resolved(
    config=ServeConfig(),
    hardware=HARDWARE,
    threads=2,
    backend="cpu",
    dtype="float32",
    kv_dtype="float16",
    isa="avx2",
    reasons={"kv_tokens": "a quarter", "threads": "two CPUs", "backend": "kernels are built"},
)


def banner(url: str = "http://127.0.0.1:30000", *, needs_key: bool = False) -> str:
    return render_banner(url, CARD, RESOLVED, STARTUP, needs_key=needs_key)


def curl_words(text: str) -> list[str]:
    found = re.search(r"  (curl .*?)\n\n", text, re.S)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def python_lines(text: str) -> str:
    _, _, code = text.partition("openai`:\n\n")
    return "\n".join(line.removeprefix("  ") for line in code.splitlines())


def test_it_says_where_what_and_why() -> None:
    text = banner()
    assert text.splitlines()[0].endswith("serves tiny at http://127.0.0.1:30000")
    for said in (
        "tiny.Q4_1.gguf (llama, gguf Q4_1)",
        "8,192 tokens",
        "120,261 tokens in float16 (a quarter)",
        "2 (two CPUs)",
        "cpu, avx2 (kernels are built)",
        "2.3 s (import 1.0, weights 0.9)",
    ):
        assert said in text
    assert max(map(len, text.splitlines())) <= 200


@pytest.mark.parametrize("needs_key", [False, True])
def test_lines_to_try_are_whole(needs_key: bool) -> None:
    words = curl_words(banner(needs_key=needs_key))
    assert words[:2] == ["curl", "http://127.0.0.1:30000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "tiny"
    assert ("Authorization: Bearer $PHLOEM_API_KEY" in words) is needs_key
    code = python_lines(banner(needs_key=needs_key))
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert {"OpenAI", "client", "schema"} <= names
    assert ("os" in names) is needs_key


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://0.0.0.0:1", "http://127.0.0.1:1/v1"),
        ("http://[::]:1", "http://[::1]:1/v1"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1/v1"),
    ],
)
def test_lines_to_try_go_to_an_address_that_can_be_reached(url: str, reached: str) -> None:
    assert curl_words(banner(url))[1] == f"{reached}/chat/completions"
