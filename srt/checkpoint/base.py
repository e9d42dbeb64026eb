"""A checkpoint: one model's configuration, tokenizer and weights, whatever the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.constrained.vocab import Vocabulary
from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.checkpoint.tokenizer_data import TokenizerData

if TYPE_CHECKING:
    from phloem.srt.checkpoint.tensors import Tensor


class Checkpoint(ABC):
    """Opened by `open_checkpoint`, which checks everything but the numbers inside the weights.

    `format` is for people, as in "gguf Q4_1" or "safetensors bfloat16".
    """

    path: Path
    format: str
    config: ModelConfig

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Every weight the model needs (`shapes.expected_tensors`), each once, in file order."""

    @abstractmethod
    def _read_tokenizer(self) -> TokenizerData: ...

    @cached_property
    def _tokenizer_data(self) -> TokenizerData:
        return self._read_tokenizer()

    def tokenizer_data(self) -> TokenizerData:
        """The token table and how to build the tokenizer. Read once, then kept."""
        return self._tokenizer_data

    def vocabulary(self) -> Vocabulary:
        """The token table as grammars need it; as wide as the model's logits."""
        data = self.tokenizer_data()
        special = (data.control_ids - data.mark_ids) | data.unused_ids
        tokens = [b"" if i in special else piece for i, piece in enumerate(data.pieces)]
        return Vocabulary(
            tokens=tokens,
            special_ids=special,
            stop_ids=self.config.eos_ids,
            size=self.config.vocab_size,
        )
