"""What a checkpoint says about its tokenizer: the token table in bytes, and how to build it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class ByteLevelBpe:
    """BPE over bytes spelled as printable characters (GPT-2's way), ranked by `merges`.

    `pre` names the rule that splits text into words first, in GGUF's names.
    """

    merges: list[str]
    pre: str


@dataclass(frozen=True)
class SentencePieceBpe:
    """BPE over characters with ▁ for a space, ranked by `scores`, bytes as a last resort."""

    scores: tuple[float, ...]
    add_space_prefix: bool


@dataclass(frozen=True)
class TokenizerJson:
    """A tokenizer.json of the `tokenizers` library, as text."""

    text: str


ANSWER_MARKS: Final = frozenset(
    {"<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"}
    | {"[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"}
)
"""Markup that models write in their answers, where it is read: reasoning and calls of tools."""


@dataclass(frozen=True, kw_only=True)
class TokenizerData:
    """The token table, and the recipe for the splitting.

    `texts[i]` is token i as the file spells it, `pieces[i]` the exact bytes it adds to the text
    (for a control token its markup; `b""` for an unused id). `control_ids` are markup: but for
    `mark_ids` they are never ordinary output. `added_ids` are ordinary output but are matched whole
    in the text before any splitting. `unused_ids` never occur. `strip_leading_space`: the first
    space of a text is the encoder's, not the user's. `chat_templates` are Jinja sources by name,
    "default" the main one.
    """

    texts: list[str]
    pieces: list[bytes]
    model: ByteLevelBpe | SentencePieceBpe | TokenizerJson
    control_ids: frozenset[int]
    added_ids: frozenset[int] = frozenset()
    unused_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    strip_leading_space: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def mark_ids(self) -> frozenset[int]:
        """Control tokens that are part of an answer's text."""
        return frozenset(i for i in self.control_ids if self.texts[i] in ANSWER_MARKS)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


# Latin-1 characters outside the alphabet go to one that Latin-1 cannot encode.
_FROM_CHARACTER = dict.fromkeys(range(0x100), 0x100) | {
    ord(character): byte for character, byte in _byte_of_character().items()
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_piece(text: str) -> bytes:
    """Bytes of a byte-level BPE token; one with a foreign character is taken literally."""
    try:
        return text.translate(_FROM_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def sentencepiece_piece(text: str) -> bytes:
    """Bytes of a SentencePiece token: ▁ is a space, `<0x0A>` a byte."""
    if byte := _BYTE_TOKEN.fullmatch(text):
        return bytes.fromhex(byte[1])
    return text.replace("\u2581", " ").encode()
