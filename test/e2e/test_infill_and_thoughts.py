"""Models with tokens of their own for filling in the middle and for thinking, over HTTP: tiny ones
with random weights, so what they write means nothing, but where it goes does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phloem.srt.checkpoint import ModelConfig, RopeConfig, expected_tensors

pytestmark = [pytest.mark.e2e, pytest.mark.model]

BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|im_end|>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
}
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)


def byte_level(added: list[AddedToken]) -> Tokenizer:
    """As Qwen, StarCoder and DeepSeek have it."""
    texts = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "de", "def", "Ġr"]
    merges = [("d", "e"), ("de", "f"), ("Ġ", "r")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.add_tokens(added)
    return tokenizer


def sentencepiece(added: list[AddedToken]) -> Tokenizer:
    """As Code Llama has it: a space is put before every text."""
    texts = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "d", "e", "f"]
    texts += ["▁d", "▁de", "▁def"]
    merges = [("▁", "d"), ("▁d", "e"), ("▁de", "f")]
    tokenizer = Tokenizer(
        models.BPE({text: i for i, text in enumerate(texts)}, merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.add_tokens(added)
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    """A checkpoint of two layers for `tokenizer`."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        context_length=512,
        tie_embeddings=True,
        eos_ids=(2,),
        bos_id=None,
    )
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    settings = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.context_length,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    told = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# ---------------------------------------------------------------------- in the middle


@pytest.fixture(scope="module", params=FAMILIES)
def coder(
    request: pytest.FixtureRequest,
    start_server: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, Tokenizer, tuple[str, ...]]]:
    marks = FAMILIES[request.param]
    make = sentencepiece if request.param == "codellama" else byte_level
    tokenizer = make([AddedToken(mark, special=True) for mark in marks if mark not in CONTROLS])
    model = write_model(tmp_path_factory.mktemp("coder"), tokenizer)
    server = start_server("--kv-tokens", "2048", model=model)
    yield server, tokenizer, marks
    server.stop()


def infill(server: Any, **fields: Any) -> Any:
    body = {"prompt": BEFORE, "suffix": BEHIND, "max_tokens": 6, "temperature": 0}
    status, reply = server.post("/v1/completions", body | {"return_token_ids": True} | fields)
    assert status == 200, reply
    return reply


def test_the_prompt_is_the_familys(coder: Any) -> None:
    server, tokenizer, (begin, hole, middle, _) = coder
    (choice,) = infill(server)["choices"]
    mark = tokenizer.token_to_id
    second = tokenizer.encode(BEHIND).ids
    if begin.startswith("▁"):
        second = second[1:]  # it goes on, so no space is put before it
    first = tokenizer.encode(BEFORE).ids
    assert choice["prompt_token_ids"] == [mark(begin), *first, mark(hole), *second, mark(middle)]


def test_its_end_token_ends_the_middle(coder: Any) -> None:
    server, tokenizer, marks = coder
    reply = infill(server, logit_bias={str(tokenizer.token_to_id(marks[3])): 100})
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 1


def test_markup_in_the_texts_is_text(coder: Any) -> None:
    server, tokenizer, marks = coder
    ids = {tokenizer.token_to_id(mark) for mark in marks[:3]}
    (choice,) = infill(server, prompt=f"a{marks[2]}b", suffix=f"c{marks[0]}")["choices"]
    assert sum(i in ids for i in choice["prompt_token_ids"]) == 3


def test_a_stream_and_ollama_say_the_same(coder: Any) -> None:
    server, _, _ = coder
    reply = infill(server)
    (choice,) = reply["choices"]
    body = {"prompt": BEFORE, "suffix": BEHIND, "max_tokens": 6, "temperature": 0, "stream": True}
    events = server.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    options = {"num_predict": 6, "temperature": 0, "repeat_penalty": 1.0}
    body = {"prompt": BEFORE, "suffix": BEHIND, "options": options, "stream": False}
    status, told = server.post("/api/generate", body)
    assert status == 200, told
    assert told["response"] == choice["text"]
    assert told["prompt_eval_count"] == reply["usage"]["prompt_tokens"]
    assert "insert" in server.post("/api/show", {"model": "tiny"})[1]["capabilities"]


# ------------------------------------------------------------------------- thoughts


@pytest.fixture(scope="module", params=[False, True], ids=["added", "control"])
def thinker(
    request: pytest.FixtureRequest,
    start_server: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Its marks are ordinary tokens (Qwen, DeepSeek), or control tokens (Mistral)."""
    tokenizer = byte_level(
        [AddedToken(mark, special=request.param) for mark in ("<think>", "</think>")]
    )
    model = write_model(tmp_path_factory.mktemp("thinker"), tokenizer, TEMPLATE)
    server = start_server("--kv-tokens", "2048", model=model)
    # Of itself it neither ends nor changes its mind: no such token is likely.
    unlikely = [tokenizer.token_to_id(text) for text in (*CONTROLS, "<think>", "</think>")]
    server.bias = {str(i): -100 for i in unlikely}
    yield server
    server.stop()


def ask(server: Any, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Is it?"}],
        "temperature": 0,
        "max_tokens": 40,
        "logit_bias": server.bias,
    } | fields


def chat(server: Any, **fields: Any) -> Any:
    status, reply = server.post("/v1/chat/completions", ask(server, **fields))
    assert status == 200, reply
    return reply


ANSWER = {"guided_choice": ["yes", "no"], "thinking_token_budget": 5}


def test_thoughts_are_apart_and_within_their_budget(thinker: Any) -> None:
    reply = chat(thinker, **ANSWER)
    (choice,) = reply["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
    details = reply["usage"]["completion_tokens_details"]
    assert 5 <= details["reasoning_tokens"] <= 7  # with the mark that ends them
    assert details["reasoning_tokens"] < reply["usage"]["completion_tokens"]


def test_a_stream_keeps_them_apart_too(thinker: Any) -> None:
    (choice,) = chat(thinker, **ANSWER)["choices"]
    events = thinker.events("/v1/chat/completions", ask(thinker, stream=True, **ANSWER))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    thoughts = [delta.get("reasoning_content") or "" for delta in deltas]
    answer = [delta.get("content") or "" for delta in deltas]
    assert "".join(thoughts) == choice["message"]["reasoning_content"]
    assert "".join(answer) == choice["message"]["content"]
    last_thought = max(i for i, text in enumerate(thoughts) if text)
    assert last_thought < min(i for i, text in enumerate(answer) if text)


def test_without_a_budget_it_thinks_until_the_tokens_are_used_up(thinker: Any) -> None:
    reply = chat(thinker, max_tokens=8)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


def test_a_budget_without_a_constraint_leaves_the_rest_for_the_answer(thinker: Any) -> None:
    reply = chat(thinker, thinking_token_budget=3, max_tokens=12)
    (choice,) = reply["choices"]
    assert choice["message"]["content"]
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5


def test_thinking_turned_off(thinker: Any) -> None:
    reply = chat(thinker, guided_choice=["yes", "no"], reasoning_effort="none")
    (choice,) = reply["choices"]
    assert not choice["message"].get("reasoning_content")
    assert choice["message"]["content"] in ("yes", "no")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thoughts_as_they_were_written(thinker: Any) -> None:
    (choice,) = chat(thinker, separate_reasoning=False, **ANSWER)["choices"]
    thoughts, mark, answer = choice["message"]["content"].partition("</think>")
    assert thoughts
    assert mark
    assert answer.strip() in ("yes", "no")


def test_every_protocol_has_its_own_place_for_them(thinker: Any) -> None:
    messages = [{"role": "user", "content": "Is it?"}]
    fields = {"guided_choice": ["yes", "no"], "temperature": 0, "logit_bias": thinker.bias}
    status, told = thinker.post(
        "/v1/messages",
        {
            "messages": messages,
            "max_tokens": 40,
            "thinking": {"type": "enabled", "budget_tokens": 5},
            **fields,
        },
    )
    assert status == 200, told
    assert [block["type"] for block in told["content"]] == ["thinking", "text"]
    assert told["content"][1]["text"] in ("yes", "no")
    status, told = thinker.post(
        "/v1/responses",
        {"input": "Is it?", "max_output_tokens": 40, "thinking_token_budget": 5, **fields},
    )
    assert status == 200, told
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    schema = {"enum": ["yes", "no"]}
    body = {"messages": messages, "think": True, "format": schema, "stream": False}
    status, told = thinker.post(
        "/api/chat", body | {"options": {"num_predict": 40, "temperature": 0}}
    )
    assert status == 200, told
    assert told["message"]["thinking"]
    assert told["message"]["content"] in ('"yes"', '"no"')
