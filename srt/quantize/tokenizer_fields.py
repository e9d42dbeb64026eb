"""A tokenizer.json in GGUF's fields, where GGUF can say the same.

GGUF keeps the tables and names the way text is split into words. Which name fits is found by
trying each known rule on a text full of hard cases; then the tokenizer that a reader of the fields
builds must give the same tokens as the original. Otherwise the model is refused: it would answer
worse without any error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import tokenizers
from gguf import GGUFValueType, TokenType

from phloem.srt.checkpoint import Checkpoint, CheckpointError, TokenizerData
from phloem.srt.checkpoint.tokenizer_data import ByteLevelBpe, SentencePieceBpe, TokenizerJson
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.sample import sample_text
from phloem.srt.quantize.source import Field
from phloem.srt.tokenizer.building import build
from phloem.srt.tokenizer.splitting import SPLIT_RULES

_HARD_CASES = """\
I'm we'll THEY'RE it's don't CAN'T  two  spaces   three\tand\ttabs \n\n\n  indented
\r\nwindows\r\n 3.14159 1234567890 12 345 6789 1,000,000 $5 50% a1b2c3 2024-01-31T23:59:59Z
snake_case camelCase HTTPServer __init__ != == => -> :: // /* */ <b>"quoted"</b> {'a': [1, 2]}
naïve café cafe\u0301 Straße ÇA İstanbul ǅ ﬁ ½ ² Ⅷ ٣٤ हिन्दी ไทย العربية עברית Привет, мир! Ελλάδα
日本語のテキスト、漢字かな。 中文字符！ 한국어 텍스트 🙂👍🏽 👨‍👩‍👧 \u00a0nbsp\u3000wide \u200bzero
...!!! ??? --- *** ### `code` ~tilde^ |pipe| end of text   """

Tables = dict[str, Any]


def tokenizer_fields(checkpoint: Checkpoint) -> list[Field]:
    """All `tokenizer.*` fields.

    Raises:
        CheckpointError: the tokenizer files are damaged.
        QuantizeError: GGUF cannot say what this tokenizer does.
    """
    data = checkpoint.tokenizer_data()
    assert isinstance(data.model, TokenizerJson)
    model = _in_gguf(checkpoint, data, data.model)
    texts, types = _token_table(checkpoint, data, model)
    fields = [
        _text("ggml.model", "gpt2" if isinstance(model, ByteLevelBpe) else "llama"),
        Field(f"{_PREFIX}ggml.tokens", texts, GGUFValueType.ARRAY, GGUFValueType.STRING),
        Field(f"{_PREFIX}ggml.token_type", types, GGUFValueType.ARRAY, GGUFValueType.INT32),
    ]
    if isinstance(model, ByteLevelBpe):
        fields.insert(1, _text("ggml.pre", model.pre))
        merges = Field(
            f"{_PREFIX}ggml.merges", model.merges, GGUFValueType.ARRAY, GGUFValueType.STRING
        )
        fields += [merges] if model.merges else []
    else:
        scores = list(model.scores) + [0.0] * (len(texts) - len(model.scores))
        fields += [
            Field(f"{_PREFIX}ggml.scores", scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
            Field(f"{_PREFIX}ggml.add_space_prefix", model.add_space_prefix, GGUFValueType.BOOL),
        ]
    fields += _special_ids(checkpoint, data)
    for name, template in sorted(data.chat_templates.items()):
        fields.append(_text("chat_template" + ("" if name == "default" else f".{name}"), template))
    return fields


_PREFIX = "tokenizer."


def _text(key: str, value: str) -> Field:
    return Field(_PREFIX + key, value, GGUFValueType.STRING)


def _special_ids(checkpoint: Checkpoint, data: TokenizerData) -> Iterator[Field]:
    """GGUF has names for three end tokens. Readers add well-known control tokens themselves, so
    others go first."""
    ends = checkpoint.config.eos_ids
    main = ends[0] if data.eos_id is None else data.eos_id
    others = sorted((i for i in ends if i != main), key=data.control_ids.__contains__)
    ids = {
        "bos": data.bos_id,
        "eos": main,
        "eot": others[0] if others else None,
        "eom": others[1] if len(others) > 1 else None,
        "unknown": data.unk_id,
        "padding": data.pad_id,
    }
    for name, token_id in ids.items():
        if token_id is not None:
            yield Field(f"{_PREFIX}ggml.{name}_token_id", token_id, GGUFValueType.UINT32)
    yield Field(f"{_PREFIX}ggml.add_bos_token", data.add_bos, GGUFValueType.BOOL)


def _token_table(
    checkpoint: Checkpoint, data: TokenizerData, model: ByteLevelBpe | SentencePieceBpe
) -> tuple[list[str], list[int]]:
    """Texts and types, one for each row of the embedding: rows without a token are unused."""
    texts, types = [], []
    for i in range(checkpoint.config.vocab_size):
        text = data.texts[i] if i < len(data.texts) else ""
        if i >= len(data.texts) or i in data.unused_ids:
            text, kind = f"[PAD{i}]", TokenType.UNUSED
        elif i in data.control_ids:
            is_unknown = i == data.unk_id and isinstance(model, SentencePieceBpe)
            kind = TokenType.UNKNOWN if is_unknown else TokenType.CONTROL
        elif i in data.added_ids:
            kind = TokenType.USER_DEFINED
        elif isinstance(model, SentencePieceBpe) and text.startswith("<0x") and len(text) == 6:
            kind = TokenType.BYTE
        else:
            kind = TokenType.NORMAL
        texts.append(text)
        types.append(int(kind))
    return texts, types


def _in_gguf(
    checkpoint: Checkpoint, data: TokenizerData, original: TokenizerJson
) -> ByteLevelBpe | SentencePieceBpe:
    """The tokenizer in GGUF's terms, proven on a text."""
    encoder = build(checkpoint.path, data)
    tables: Tables = msgspec.json.decode(original.text)["model"]
    merges = _merges(tables)
    candidates: Iterator[ByteLevelBpe | SentencePieceBpe]
    if tables.get("byte_fallback"):
        scores = _scores(data, merges)
        candidates = (SentencePieceBpe(scores, prefix) for prefix in (True, False))
    else:
        joined = [" ".join(pair) for pair in merges]
        candidates = (ByteLevelBpe(joined, pre) for pre in _fitting_rules(encoder, tables))
    for candidate in candidates:
        if _same_tokens(checkpoint, data, encoder, candidate):
            return candidate
    raise QuantizeError(
        "its tokenizer splits text in a way that GGUF has no name for; a GGUF file would silently "
        "give other tokens"
    )


def _merges(tables: Tables) -> list[tuple[str, str]]:
    """Both spellings: "a b", and ["a", "b"]."""
    pairs = [m.split(" ") if isinstance(m, str) else m for m in tables.get("merges", [])]
    if any(len(pair) != 2 or " " in pair[0] + pair[1] for pair in pairs):
        raise QuantizeError("its tokenizer merges pieces with spaces in them, which GGUF cannot")
    return [(left, right) for left, right in pairs]


def _fitting_rules(encoder: tokenizers.Tokenizer, tables: Tables) -> Iterator[str]:
    """Names of the rules that bring the text to the same form and split it at the same places."""

    def words(splitter: Any, normalizer: Any) -> list[Any]:
        text = _HARD_CASES + sample_text()
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        return [text] if splitter is None else splitter.pre_tokenize_str(text)

    wanted = words(encoder.pre_tokenizer, encoder.normalizer)
    for name, rule in SPLIT_RULES.items():
        if rule.whole_words == bool(tables.get("ignore_merges")) and wanted == words(
            rule.pre_tokenizer(), rule.normalizer()
        ):
            yield name


def _scores(data: TokenizerData, merges: list[tuple[str, str]]) -> tuple[float, ...]:
    """Scores that rank tokens as the merges do.

    tokenizer.json ranks pairs, GGUF the tokens they make: the same if all pairs that make a token
    have neighbouring ranks, and every pair of tokens that makes a token is a merge.
    """
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        made = left + right
        if made != last and made in ranks:
            raise QuantizeError("its tokenizer ranks merges in a way that token scores cannot")
        ranks.setdefault(made, rank)
        last = made
    aside = data.control_ids | data.added_ids | data.unused_ids
    ordinary = {text for i, text in enumerate(data.texts) if i not in aside}
    known = set(merges)
    for text in ordinary:
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair[0] in ordinary and pair[1] in ordinary and pair not in known:
                raise QuantizeError("its tokenizer lacks merges that token scores would allow")
    return tuple(float(-ranks.get(text, len(merges))) for text in data.texts)


def _same_tokens(
    checkpoint: Checkpoint,
    data: TokenizerData,
    encoder: tokenizers.Tokenizer,
    model: ByteLevelBpe | SentencePieceBpe,
) -> bool:
    """Whether a reader of the fields encodes as the original does, added tokens included."""
    try:
        written = build(checkpoint.path, replace(data, model=model))
    except CheckpointError:
        return False
    marks = [data.texts[i] for i in sorted(data.control_ids | data.added_ids) if data.texts[i]]
    probe = _HARD_CASES + sample_text() + "".join(f" a {mark}b{mark} " for mark in marks)
    theirs, ours = (e.encode(probe, add_special_tokens=False).ids for e in (encoder, written))
    return bool(theirs == ours)
