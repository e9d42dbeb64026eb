"""Text ↔ token ids of one model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from phloem.srt.checkpoint import Checkpoint, ModelConfig, TokenizerData
from phloem.srt.errors import InvalidRequest
from phloem.srt.tokenizer.building import build, without_controls


@dataclass(frozen=True)
class ControlToken:
    """A control token; `lstrip` and `rstrip`: it swallows white space on that side."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an open checkpoint. Raises `CheckpointError` if it cannot be built."""
    return Tokenizer(checkpoint.path, checkpoint.tokenizer_data(), checkpoint.config)


class Tokenizer:
    """Encodes with the `tokenizers` library; decodes from the token table, byte by byte.

    Safe to use from several threads. `vocab_size` is the width of the model's logits: ids from
    the table's end up to there exist but have no text. `special_ids` are control tokens, but for
    those that are part of an answer's text (see `TokenizerData.mark_ids`).
    """

    def __init__(self, path: Path, data: TokenizerData, config: ModelConfig) -> None:
        self._data = data
        self._pieces = data.pieces
        self._encoder = build(path, data)
        self._plain = without_controls(path, self._encoder)
        self._plain_inside = _inside(self._plain)
        self.vocab_size = config.vocab_size
        self.special_ids = data.control_ids - data.mark_ids
        self._marks = {data.texts[i]: i for i in data.mark_ids}
        self._mark_pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self.eos_ids = config.eos_ids
        self.bos_id = config.bos_id
        self.add_bos = config.add_bos
        self.strip_leading_space = data.strip_leading_space
        self.controls = _controls(self._encoder)
        unknown = self._encoder.model.unk_token
        self._markup_ids = frozenset(i for i in data.control_ids if data.texts[i] != unknown)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`, with no token added around it.

        With `special` control tokens are recognised in the text; without, their markup is
        ordinary text and gives ordinary tokens only.

        Raises:
            InvalidRequest: the text has lone surrogates.
        """
        return self._run(self._encoder, text) if special else self._encode_plain(text, inside=False)

    def encode_inside(self, text: str) -> list[int]:
        """Like `encode(text, special=False)`, for text that follows a control token."""
        return self._encode_plain(text, inside=True)

    def encode_answer(self, text: str) -> list[int]:
        """Like `encode_inside`, for text that the model writes: its marks are control tokens."""
        if not self._marks:
            return self.encode_inside(text)
        ids: list[int] = []
        at = 0
        for mark in self._mark_pattern.finditer(text):
            if mark.start() > at:
                ids += self.encode_inside(text[at : mark.start()])
            ids.append(self._marks[mark[0]])
            at = mark.end()
        return ids + self.encode_inside(text[at:]) if at < len(text) else ids

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, after the BOS token if the model wants one and the text does not bring it."""
        ids = self.encode(text)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids` from the start of a text; bytes that are no UTF-8 become U+FFFD.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        special = self.special_ids if skip_special else frozenset()
        data = b"".join([self.token_bytes(i) for i in ids if i not in special])
        if self.strip_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token adds to the text; of a control token, its markup."""
        if 0 <= token_id < len(self._pieces):
            return self._pieces[token_id]
        if 0 <= token_id < self.vocab_size:
            return b""
        raise InvalidRequest(
            f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
        )

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`; None when there is none."""
        found: int | None = self._encoder.token_to_id(text)
        return found

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def special_tokens(self) -> dict[str, str]:
        """The markup that templates know by name: bos_token, eos_token, unk_token, pad_token."""
        data = self._data
        named = {
            "bos_token": data.bos_id,
            "eos_token": data.eos_id,
            "unk_token": data.unk_id,
            "pad_token": data.pad_id,
        }
        return {name: data.texts[i] for name, i in named.items() if i is not None}

    def _encode_plain(self, text: str, *, inside: bool) -> list[int]:
        ids = self._run(self._plain_inside if inside else self._plain, text)
        if self._markup_ids.isdisjoint(ids):
            return ids
        # A control token whose markup is one word of the splitting rule: spell it in two.
        spelled: list[int] = []
        for i in ids:
            if i in self._markup_ids:
                markup = self._data.texts[i]
                spelled += self.encode_inside(markup[:1]) + self.encode_inside(markup[1:])
            else:
                spelled.append(i)
        return spelled

    @staticmethod
    def _run(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("the text is not valid Unicode (it has lone surrogates)") from None
        return ids


def _controls(encoder: tokenizers.Tokenizer) -> tuple[ControlToken, ...]:
    return tuple(
        ControlToken(i, token.content, token.lstrip, token.rstrip)
        for i, token in encoder.get_added_tokens_decoder().items()
        if token.special and token.content
    )


def _inside(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """An encoder for text that does not open the prompt: the same, unless a space is put before
    the first word only."""
    metaspace = plain.pre_tokenizer
    if not isinstance(metaspace, pre_tokenizers.Metaspace) or metaspace.prepend_scheme != "first":
        return plain
    inside = tokenizers.Tokenizer.from_str(plain.to_str())
    inside.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=metaspace.replacement, prepend_scheme="never", split=metaspace.split
    )
    inside.encode_special_tokens = True
    return inside
