"""TokenizerData from the metadata of a GGUF file."""

from __future__ import annotations

from phloem.srt.checkpoint.gguf_config import Metadata
from phloem.srt.checkpoint.gguf_header import GgufHeader
from phloem.srt.checkpoint.tokenizer_data import (
    ByteLevelBpe,
    SentencePieceBpe,
    TokenizerData,
    byte_level_piece,
    sentencepiece_piece,
)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
_PREFIX = "tokenizer.ggml."

_ADD_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Pre-tokenizers whose models open a prompt with BOS when the file does not say."""

_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end a turn or a text in every model that has them: GGUF files name one end
token, while chat models use several."""


class GgufTokenizer:
    """The tokenizer part of a header. Each table is decoded once, when first needed."""

    def __init__(self, header: GgufHeader) -> None:
        self.meta = Metadata(header)
        self.model = self.meta.get(f"{_PREFIX}model", str)
        tokens = self.meta.array(f"{_PREFIX}tokens")
        if tokens is None:
            raise self.meta.fail(f"metadata key '{_PREFIX}tokens' is missing")
        self.texts = tokens.strings()
        types = self.meta.array(f"{_PREFIX}token_type")
        self.types = (1,) * len(self.texts) if types is None else types.numbers()
        if len(self.types) != len(self.texts):
            raise self.meta.fail(f"{len(self.types)} token types for {len(self.texts)} tokens")
        self.control_ids = self._of_type(_CONTROL, _UNKNOWN)
        self.bos_id = self._id("bos_token_id")
        self.add_bos = self._add_bos()
        self.end_id: int | None = None
        """Stands behind a text that is embedded."""
        if self.meta.find(f"{_PREFIX}add_eos_token", bool):
            self.end_id = self._id("eos_token_id")

    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence: the named ones, then well-known control tokens."""
        named = (self._id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        ids = [i for i in named if i is not None]
        ids += sorted(i for i in self.control_ids if self.texts[i] in _END_TOKENS)
        if not ids:
            raise self.meta.fail("the file names no end token")
        return tuple(dict.fromkeys(ids))

    def data(self) -> TokenizerData:
        """Raises `CheckpointError` for a kind of tokenizer that is not supported."""
        model: ByteLevelBpe | SentencePieceBpe
        match self.model:
            case "gpt2":
                model, piece = self._byte_level(), byte_level_piece
            case "llama":
                model, piece = self._sentencepiece(), sentencepiece_piece
            case other:
                raise self.meta.fail(
                    f"tokenizer {other!r} is not supported (supported: gpt2, llama)"
                )
        added_ids, unused_ids = self._of_type(_USER_DEFINED), self._of_type(_UNUSED)
        pieces = [piece(text) for text in self.texts]
        for i in self.control_ids | added_ids:
            pieces[i] = self.texts[i].encode()
        for i in unused_ids:
            pieces[i] = b""
        return TokenizerData(
            texts=self.texts,
            pieces=pieces,
            model=model,
            control_ids=self.control_ids,
            added_ids=added_ids,
            unused_ids=unused_ids,
            bos_id=self.bos_id,
            eos_id=self._id("eos_token_id"),
            unk_id=self._id("unknown_token_id"),
            pad_id=self._id("padding_token_id"),
            add_bos=self.add_bos,
            strip_leading_space=isinstance(model, SentencePieceBpe) and model.add_space_prefix,
            chat_templates=self._chat_templates(),
        )

    def _of_type(self, *types: int) -> frozenset[int]:
        return frozenset(i for i, kind in enumerate(self.types) if kind in types)

    def _id(self, key: str) -> int | None:
        value = self.meta.find(f"{_PREFIX}{key}", int)
        if value is None or value == 0xFFFFFFFF:  # how some converters write "none"
            return None
        if not 0 <= value < len(self.texts):
            raise self.meta.fail(f"{_PREFIX}{key} is {value}, there are {len(self.texts)} tokens")
        return value

    def _add_bos(self) -> bool:
        by_default = self.model == "llama" or self._pre() in _ADD_BOS_BY_DEFAULT
        add_bos = self.meta.find(f"{_PREFIX}add_bos_token", bool)
        if add_bos is None:
            add_bos = by_default and self.bos_id is not None
        if add_bos and self.bos_id is None:
            raise self.meta.fail("prompts begin with a BOS token, but the file names none")
        return add_bos

    def _pre(self) -> str | None:
        return self.meta.find(f"{_PREFIX}pre", str)

    def _byte_level(self) -> ByteLevelBpe:
        pre = self._pre()
        if pre is None:
            raise self.meta.fail(
                f"metadata key '{_PREFIX}pre' is missing: the file does not say how its tokenizer "
                "splits text, so it would have to be guessed (convert the model again)"
            )
        merges = self.meta.array(f"{_PREFIX}merges")
        if merges is None:
            raise self.meta.fail(f"metadata key '{_PREFIX}merges' is missing")
        return ByteLevelBpe(merges.strings(), pre)

    def _sentencepiece(self) -> SentencePieceBpe:
        scores = self.meta.array(f"{_PREFIX}scores")
        if scores is None:
            raise self.meta.fail(f"metadata key '{_PREFIX}scores' is missing")
        values = scores.numbers()
        if len(values) != len(self.texts):
            raise self.meta.fail(f"{len(values)} scores for {len(self.texts)} tokens")
        add_space_prefix = self.meta.get(f"{_PREFIX}add_space_prefix", bool, True)
        return SentencePieceBpe(values, add_space_prefix)

    def _chat_templates(self) -> dict[str, str]:
        key = "tokenizer.chat_template"
        names = {"default": key} | {
            name.removeprefix(f"{key}."): name
            for name in self.meta.header.metadata
            if name.startswith(f"{key}.")
        }
        found = {name: self.meta.find(full, str) for name, full in names.items()}
        return {name: source for name, source in found.items() if source is not None}
