"""Builds the `tokenizers` object for a token table."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers

from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.tokenizer_data import (
    ByteLevelBpe,
    SentencePieceBpe,
    TokenizerData,
    TokenizerJson,
)
from phloem.srt.tokenizer.splitting import SPLIT_RULES


def build(path: Path, data: TokenizerData) -> tokenizers.Tokenizer:
    """An encoder that recognises control tokens in the text and adds none.

    Raises:
        CheckpointError: an unknown splitting rule, or tables that do not fit together.
    """
    model = data.model
    if isinstance(model, TokenizerJson):
        try:
            encoder = tokenizers.Tokenizer.from_str(model.text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(path, f"tokenizer.json: {error}") from None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder
    try:
        if isinstance(model, ByteLevelBpe):
            encoder = _byte_level(path, data, model)
        else:
            encoder = _sentencepiece(data, model)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            path, f"the tokenizer's tables do not fit together: {error}"
        ) from None
    for ids, special in ((data.control_ids, True), (data.added_ids, False)):
        tokens = [
            AddedToken(data.texts[i], special=special, normalized=False)
            for i in sorted(ids)
            if data.texts[i]
        ]
        if special:
            encoder.add_special_tokens(tokens)
        else:
            encoder.add_tokens(tokens)
    return encoder


def without_controls(path: Path, encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second encoder over the same tables for which control markup is ordinary text."""
    plain = tokenizers.Tokenizer(encoder.model)
    for part in ("normalizer", "pre_tokenizer"):
        value = getattr(encoder, part)
        if value is not None:
            setattr(plain, part, value)
    added = encoder.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        if token.special:
            plain.add_special_tokens([token])
        else:
            plain.add_tokens([token])
    if plain.get_added_tokens_decoder().keys() != added.keys():
        raise CheckpointError(path, "tokenizer.json: the ids of its added tokens have gaps")
    plain.encode_special_tokens = True  # that is: encode them like any other text
    return plain


def _byte_level(path: Path, data: TokenizerData, model: ByteLevelBpe) -> tokenizers.Tokenizer:
    rule = SPLIT_RULES.get(model.pre)
    if rule is None:
        raise CheckpointError(
            path,
            f"pre-tokenizer {model.pre!r} is not known (known: {', '.join(SPLIT_RULES)}); "
            "another one would silently give other tokens",
        )
    merges = [_pair(path, merge) for merge in model.merges]
    bpe = models.BPE(_vocab(data), merges, ignore_merges=rule.whole_words)
    encoder = tokenizers.Tokenizer(bpe)
    normalizer = rule.normalizer()
    if normalizer is not None:
        encoder.normalizer = normalizer
    encoder.pre_tokenizer = rule.pre_tokenizer()
    return encoder


def _sentencepiece(data: TokenizerData, model: SentencePieceBpe) -> tokenizers.Tokenizer:
    unknown = None if data.unk_id is None else data.texts[data.unk_id]
    bpe = models.BPE(
        _vocab(data),
        _merges_by_score(data, model.scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    encoder = tokenizers.Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if model.add_space_prefix:
        steps.insert(0, normalizers.Prepend("\u2581"))
    encoder.normalizer = normalizers.Sequence(steps)
    return encoder


def _vocab(data: TokenizerData) -> dict[str, int]:
    return {text: i for i, text in enumerate(data.texts) if text and i not in data.unused_ids}


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(path, f"damaged: {merge!r} is not a merge of two tokens")
    return left, right


def _merges_by_score(data: TokenizerData, scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores best: best first, as BPE ranks."""
    ordinary = {
        text: i
        for i, text in enumerate(data.texts)
        if i not in data.control_ids and i not in data.unused_ids and i not in data.added_ids
    }
    ranked = sorted(ordinary.items(), key=lambda entry: (-scores[entry[1]], entry[1]))
    return [
        (text[:cut], text[cut:])
        for text, _ in ranked
        for cut in range(1, len(text))
        if text[:cut] in ordinary and text[cut:] in ordinary
    ]
