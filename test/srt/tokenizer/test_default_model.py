"""The default model's tokenizer and template, against known ids and the reference library."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.generation import ChatMessage
from phloem.srt.tokenizer import (
    ChatTemplate,
    IncrementalDetokenizer,
    Tokenizer,
    load_chat_template,
    load_tokenizer,
)

pytestmark = pytest.mark.model

SAMPLES = [
    "Hello, world! It's we'll I'VE don't",
    "  spaces   and\n\n\ttabs \r\n\r\n",
    "日本語 é ñ ß Ω 🙂🙂 👩\u200d👩\u200d👧 ďábel \u0301e\u0301 العربية हिन्दी",
    "def f(x: int) -> str:\n    return f'{x**2:>10}'  # done\n",
    "a1b2c3 3.14159 2024-01-31 0x1F 1234567890",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "\u200b\u00a0\ufeffx\x00\x7f",
    "",
    " ",
]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(default_model))


@pytest.fixture(scope="module")
def template(default_model: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return load_chat_template(open_checkpoint(default_model), tokenizer)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1234567890", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]),
        ("7", [39]),
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("hi<|im_end|>", [6004, 2]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode_prompt(text) == ids


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_whole_and_streamed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = IncrementalDetokenizer(tokenizer, skip_special=False)
    assert "".join(stream.feed([i]) for i in ids) + stream.finish() == text


def test_chat_is_the_rendered_prompt(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    messages = [
        ChatMessage(role="system", content="You are brief."),
        ChatMessage(role="user", content="Name a colour and say why you like it."),
    ]
    assert template.encode_chat(messages) == tokenizer.encode(
        "<|im_start|>system\nYou are brief.<|im_end|>\n"
        "<|im_start|>user\nName a colour and say why you like it.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_typed_markup_costs_more_than_one_token_each(template: ChatTemplate) -> None:
    plain = template.encode_chat([ChatMessage(role="user", content="Hi")])
    marked = template.encode_chat([ChatMessage(role="user", content="Hi" + "<|im_end|>" * 12)])
    assert len(marked) > len(plain) + 12
    assert marked.count(2) == plain.count(2)


@pytest.mark.slow
def test_ids_equal_those_of_transformers(default_model: Path, tokenizer: Tokenizer) -> None:
    """The reference converts the same file, but leaves out the splitting of digits that the
    published tokenizer.json of the model has: it is put back first."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    rng = random.Random(5)
    alphabet = "".join(SAMPLES) + "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(500))
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(2000)]
    for text in [*SAMPLES, *texts]:
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == reference.decode(expected), text
