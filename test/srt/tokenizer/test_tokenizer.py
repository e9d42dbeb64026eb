"""Encoding and decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from phloem.srt.checkpoint import CheckpointError, ModelConfig, TokenizerData
from phloem.srt.checkpoint.tokenizer_data import TokenizerJson, sentencepiece_piece
from phloem.srt.errors import InvalidRequest
from phloem.srt.tokenizer import Tokenizer
from phloem.srt.tokenizer.splitting import SPLIT_RULES

Make = Callable[..., Tokenizer]

shared = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.text(max_size=40) | st.text("ab c12<|im_end|>\n é🙂", max_size=40)


@shared
@given(text=texts)
def test_plain_encoding_decodes_to_the_text_and_has_no_control_token(
    byte_level: Tokenizer, text: str
) -> None:
    ids = byte_level.encode(text, special=False)
    assert byte_level.decode(ids) == text
    assert byte_level.special_ids.isdisjoint(ids)


@shared
@given(text=texts)
def test_control_markup_is_recognised_unless_told_not_to(byte_level: Tokenizer, text: str) -> None:
    marked = f"{text}<|im_end|>{text}"
    ids = byte_level.encode(marked)
    assert 2 in ids
    assert byte_level.decode(ids) == marked
    assert byte_level.decode(ids, skip_special=True) == text.replace("<|im_end|>", "") * 2
    assert byte_level.special_ids.isdisjoint(byte_level.encode(marked, special=False))


def test_merges_and_digits(byte_level: Tokenizer) -> None:
    names = [byte_level.token_text(i) for i in byte_level.encode("abc ab 12 1b")]
    assert names == ["abc", " ab", " ", "1", "2", " ", "1", "b"]


def test_added_tokens_are_whole_and_ordinary(make_byte_level: Make) -> None:
    tokenizer = make_byte_level(added=("<think>",))
    for special in (True, False):
        ids = tokenizer.encode("a<think>b", special)
        assert [tokenizer.token_text(i) for i in ids] == ["a", "<think>", "b"]
    assert tokenizer.decode(ids, skip_special=True) == "a<think>b"


def test_prompt_gets_one_bos_if_the_model_wants_it(make_byte_level: Make) -> None:
    assert make_byte_level().encode_prompt("a")[0] != 1
    tokenizer = make_byte_level(add_bos=True)
    assert tokenizer.encode_prompt("ab")[:1] == [1]
    assert tokenizer.encode_prompt("") == [1]
    assert tokenizer.encode_prompt("<|im_start|>ab").count(1) == 1


def test_ids_without_text_and_ids_that_do_not_exist(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size - 1
    assert byte_level.token_bytes(last) == b""
    assert byte_level.decode([last]) == ""
    for bad in (-1, byte_level.vocab_size):
        with pytest.raises(InvalidRequest, match=f"token id {bad} is outside"):
            byte_level.decode([bad])


def test_half_characters(byte_level: Tokenizer) -> None:
    first, *_ = byte_level.encode("é")
    assert byte_level.token_bytes(first) == b"\xc3"
    assert byte_level.token_text(first) == "\N{REPLACEMENT CHARACTER}"


def test_lone_surrogates_are_the_requests_error(byte_level: Tokenizer) -> None:
    for special in (True, False):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            byte_level.encode("a\ud800b", special)


def test_unknown_split_rule_is_named(make_byte_level: Make) -> None:
    with pytest.raises(CheckpointError, match=r"'mystery' is not known .*smollm"):
        make_byte_level(pre="mystery")


def test_tables_that_do_not_fit(make_byte_level: Make) -> None:
    with pytest.raises(CheckpointError, match="is not a merge of two"):
        make_byte_level(("ab",))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", "It|'s|Ġ|1|2|3|ĠxyzABC|Ġ...|ĊĊĠ|Ġx"),
        ("gpt-2", "It|'s|Ġ123|ĠxyzABC|Ġ...|ĊĊĠ|Ġx"),
        ("llama-bpe", "It|'s|Ġ|123|ĠxyzABC|Ġ...ĊĊ|Ġ|Ġx"),
        ("qwen2", "It|'s|Ġ|1|2|3|ĠxyzABC|Ġ...ĊĊ|Ġ|Ġx"),
        ("tekken", "It|'s|Ġ|1|2|3|Ġxyz|ABC|Ġ...ĊĊ|Ġ|Ġx"),
        ("deepseek-coder", "It|'|s|Ġ|1|2|3|ĠxyzABC|Ġ...|Ċ|Ċ|Ġ|Ġx"),
        ("default", "It|'|s|Ġ|123|ĠxyzABC|Ġ|...|ĊĊĠ|Ġx"),
    ],
)
def test_split_rules(pre: str, words: str) -> None:
    """One string that the rules split differently."""
    split = SPLIT_RULES[pre].pre_tokenizer().pre_tokenize_str("It's 123 xyzABC ...\n\n  x")
    assert "|".join(word for word, _ in split) == words


def test_every_rule_keeps_every_character() -> None:
    text = "Ça va? 12²½ 日本語\r\n\t'LL don't  🙂 <|x|> a_b"
    for rule in SPLIT_RULES.values():
        words = rule.pre_tokenizer().pre_tokenize_str(text)
        assert words[0][1][0] == 0
        assert words[-1][1][1] == len(text)


def test_composed_form_where_the_model_was_trained_on_it(make_byte_level: Make) -> None:
    assert (
        make_byte_level(pre="qwen2").decode(make_byte_level(pre="qwen2").encode("e\u0301")) == "é"
    )
    assert make_byte_level().decode(make_byte_level().encode("e\u0301")) == "e\u0301"


def test_control_token_that_is_one_word_is_still_spelled_out(make_byte_level: Make) -> None:
    """Rules that take whole words from the vocabulary would find this one there."""
    tokenizer = make_byte_level(
        pre="llama-bpe", controls=("endoftext", "<|im_start|>", "<|im_end|>")
    )
    assert tokenizer.encode("endoftext") == [0]
    ids = tokenizer.encode("endoftext", special=False)
    assert 0 not in ids
    assert tokenizer.decode(ids) == "endoftext"


PIECES = [
    "\u2581the",
    "\u2581a",
    "he",
    "th",
    "ab",
    "\u2581\u2581",
    "aab",
    "aa",
    "ba",
    "\u2581",
    *"aebht",
]


def merged_by_score(text: str) -> list[str]:
    """What SentencePiece's BPE does, slowly: merge the best-scored neighbours, leftmost first."""
    rank = {piece: index for index, piece in enumerate(PIECES)}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [
            (rank.get(a + b, len(rank)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))
        ]
        best = min(pairs, default=(len(rank), 0))
        if best[0] == len(rank):
            return parts
        parts[best[1] : best[1] + 2] = ["".join(parts[best[1] : best[1] + 2])]


@shared
@given(text=st.text("abthe ", max_size=24))
def test_sentencepiece_merges_by_score(make_sentencepiece: Make, text: str) -> None:
    tokenizer = make_sentencepiece(PIECES)
    ids = tokenizer.encode(text)
    assert [tokenizer.token_text(i).replace(" ", "\u2581") for i in ids] == merged_by_score(text)
    assert tokenizer.decode(ids) == text


@shared
@given(text=texts)
def test_sentencepiece_falls_back_to_bytes(make_sentencepiece: Make, text: str) -> None:
    for add_space_prefix in (True, False):
        tokenizer = make_sentencepiece(PIECES, add_space_prefix=add_space_prefix)
        ids = tokenizer.encode(text, special=False)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        assert tokenizer.special_ids.isdisjoint(ids)


def library_tokenizer() -> Library:
    """A tokenizer.json in the newer Llama manner: a space before the first word only."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581a"):
        vocab[piece] = len(vocab)
    tokenizer = Library(
        models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        ["<unk>", "<s>", "</s>", AddedToken("<|end|>", special=True, rstrip=True)]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.enable_truncation(2)
    return tokenizer


@pytest.fixture
def from_json(make_config: Callable[..., ModelConfig]) -> Tokenizer:
    text = library_tokenizer().to_str()
    vocab = library_tokenizer().get_vocab(with_added_tokens=True)
    table = sorted(vocab, key=lambda token: vocab[token])
    data = TokenizerData(
        texts=table,
        pieces=[sentencepiece_piece(token) for token in table],
        model=TokenizerJson(text),
        control_ids=frozenset(vocab[token] for token in ("<unk>", "<s>", "</s>", "<|end|>")),
        added_ids=frozenset({vocab["<think>"]}),
        bos_id=1,
        strip_leading_space=True,
    )
    return Tokenizer(Path("folder"), data, make_config(len(table)))


@pytest.mark.parametrize(
    "text", ["a", " ab<s>a b", "<s>a<|end|> \n b", "a<think>é</s>", "", "ab" * 9]
)
def test_tokenizer_json_encodes_as_the_library_does(from_json: Tokenizer, text: str) -> None:
    library = library_tokenizer()
    library.no_truncation()
    assert from_json.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_tokenizer_json_without_controls(from_json: Tokenizer) -> None:
    library = library_tokenizer()
    ids = from_json.encode("a</s><think>", special=False)
    assert from_json.special_ids.isdisjoint(ids)
    assert ids[-1] == library.token_to_id("<think>")
    assert from_json.decode(ids) == "a</s><think>"
    assert from_json.encode("a", False) == [library.token_to_id("\u2581a")]
    assert from_json.encode_inside("a") == [library.token_to_id("a")]


def test_broken_tokenizer_json(make_config: Callable[..., ModelConfig]) -> None:
    data = TokenizerData(
        texts=["a"],
        pieces=[b"a"],
        model=TokenizerJson(json.dumps({"model": {"type": "BPE"}})),
        control_ids=frozenset(),
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(Path("folder"), data, make_config(1))
