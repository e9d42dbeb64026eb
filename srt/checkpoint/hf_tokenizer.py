"""TokenizerData from tokenizer.json and tokenizer_config.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.hf_config import JsonFile
from phloem.srt.checkpoint.tokenizer_data import (
    TokenizerData,
    TokenizerJson,
    byte_level_piece,
    sentencepiece_piece,
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]
    type: str = "BPE"


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the token table needs."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class HfTokenizer:
    """The tokenizer files of a folder, parsed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tokenizer.json"
        try:
            self.text = self.path.read_text(encoding="utf-8")
            self.file = msgspec.json.decode(self.text, type=_TokenizerFile)
        except OSError as error:
            raise CheckpointError(self.path, error.strerror or "cannot be read") from None
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise CheckpointError(self.path, f"damaged or not supported: {error}") from None
        if self.file.model.type != "BPE":
            raise CheckpointError(
                self.path, f"model type {self.file.model.type!r} is not supported (supported: BPE)"
            )
        self.config = JsonFile.read(folder / "tokenizer_config.json", optional=True)
        self.texts = self._texts()
        self.id_of = {text: i for i, text in enumerate(self.texts) if text}
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")
        self.add_bos = self.bos_id is not None and self._adds_bos(self.bos_id)

    def data(self) -> TokenizerData:
        """Raises `CheckpointError` when the tokens' bytes cannot be told."""
        added = self.file.added_tokens
        control_ids = frozenset(token.id for token in added if token.special)
        added_ids = frozenset(token.id for token in added if not token.special)
        present = {*self.file.model.vocab.values(), *(token.id for token in added)}
        piece = self._piece_of()
        pieces = [piece(text) for text in self.texts]
        for token in added:
            pieces[token.id] = token.content.encode()
        return TokenizerData(
            texts=self.texts,
            pieces=pieces,
            model=TokenizerJson(self.text),
            control_ids=control_ids,
            added_ids=added_ids,
            unused_ids=frozenset(range(len(self.texts))) - present,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            unk_id=self._named("unk_token"),
            pad_id=self._named("pad_token"),
            add_bos=self.add_bos,
            strip_leading_space=self._strips_leading_space(),
            chat_templates=self._chat_templates(),
        )

    def _texts(self) -> list[str]:
        entries = {i: text for text, i in self.file.model.vocab.items()}
        entries.update((token.id, token.content) for token in self.file.added_tokens)
        size = max(entries, default=-1) + 1
        if min(entries, default=0) < 0 or size > 4 * len(entries) + 1024:
            raise CheckpointError(self.path, "damaged: token ids are negative or far apart")
        return [entries.get(i, "") for i in range(size)]

    def _named(self, key: str) -> int | None:
        """Id of a special token that tokenizer_config.json names by its text."""
        value = self.config.values.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            return None
        token_id = self.id_of.get(value) if isinstance(value, str) else None
        if token_id is None:
            raise self.config.fail(key, f"{value!r} is not in the vocabulary")
        return token_id

    def _adds_bos(self, bos_id: int) -> bool:
        """Llama tokenizers follow a flag of their configuration, others the post-processor."""
        flag = self.config.find("add_bos_token", bool)
        if flag is not None and self.config.get("tokenizer_class", str, "").startswith("Llama"):
            return flag
        first = next(iter(self._template()), {})
        return bool(first.get("SpecialToken", {}).get("id") == self.texts[bos_id])

    @property
    def end_id(self) -> int | None:
        """Stands behind a text that is embedded: what the post-processor puts there."""
        last: dict[str, Any] = next(reversed(self._template()), {})
        return self.id_of.get(last.get("SpecialToken", {}).get("id"))

    def _template(self) -> list[dict[str, Any]]:
        """The pieces that the post-processor makes of a text, which is one of them."""
        for step in _steps(self.file.post_processor, "processors"):
            if step.get("type") == "TemplateProcessing":
                pieces: list[dict[str, Any]] = step.get("single", [])
                return pieces
        return []

    def _piece_of(self) -> Callable[[str], bytes]:
        kinds = {
            step.get("type")
            for part, key in (
                (self.file.decoder, "decoders"),
                (self.file.pre_tokenizer, "pretokenizers"),
            )
            for step in _steps(part, key)
        }
        if "ByteLevel" in kinds:
            return byte_level_piece
        if kinds & {"ByteFallback", "Metaspace"}:
            return sentencepiece_piece
        raise CheckpointError(
            self.path, "neither a byte-level nor a SentencePiece tokenizer: not supported"
        )

    def _strips_leading_space(self) -> bool:
        for step in _steps(self.file.decoder, "decoders"):
            if step.get("type") == "Strip" and step.get("content") == " ":
                return bool(step.get("start"))
            if step.get("type") == "Metaspace":
                return bool(step.get("prepend_scheme", "always") != "never")
        return False

    def _chat_templates(self) -> dict[str, str]:
        """chat_template.jinja and additional_chat_templates/ (newer), or tokenizer_config.json."""
        value = self.config.values.get("chat_template")
        templates: dict[str, str] = {}
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            try:
                named = msgspec.convert(value, list[dict[str, str]])
                templates.update((entry["name"], entry["template"]) for entry in named)
            except (msgspec.ValidationError, KeyError):
                raise self.config.fail("chat_template", "is not a list of templates") from None
        files = {"default": self.folder / "chat_template.jinja"}
        for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja")):
            files[path.stem] = path
        for name, path in files.items():
            if path.exists():
                templates[name] = path.read_text(encoding="utf-8")
        return templates


def _steps(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A pipeline part, or the parts of a Sequence."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for step in part.get(key, []):
            yield from _steps(step, key)
    else:
        yield part
