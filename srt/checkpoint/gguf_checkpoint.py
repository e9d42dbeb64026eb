"""A model in one GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.checkpoint.embedding import gguf_pooling
from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.gguf_config import read_config
from phloem.srt.checkpoint.gguf_header import read_header
from phloem.srt.checkpoint.gguf_names import canonical_name, interleaved_row_order
from phloem.srt.checkpoint.gguf_tokenizer import GgufTokenizer
from phloem.srt.checkpoint.shapes import check_tensors
from phloem.srt.checkpoint.tensors import Tensor, TensorInfo
from phloem.srt.checkpoint.tokenizer_data import TokenizerData

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IN_CONFIG = frozenset({"rope_freqs.weight"})  # read into RopeConfig, no weight of a layer


class GgufCheckpoint(Checkpoint):
    """Weights stay where they are: `Tensor.data` are views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self._tokenizer = GgufTokenizer(self._header)
        config = read_config(
            self._header,
            self._tokenizer.eos_ids(),
            self._tokenizer.bos_id,
            self._tokenizer.add_bos,
        )
        pooling = gguf_pooling(self._tokenizer.meta)
        end_id = None if pooling is None else self._tokenizer.end_id
        self.config = replace(config, pooling=pooling, end_id=end_id)
        if len(self._tokenizer.texts) > self.config.vocab_size:
            raise CheckpointError(
                path,
                f"{len(self._tokenizer.texts)} tokens, but the embedding has "
                f"{self.config.vocab_size} rows",
            )
        self._stored = self._by_canonical_name()
        check_tensors(path, self.config, {name: info.shape for name, info in self._stored.items()})
        self.format = f"gguf {self._main_type()}"

    def _by_canonical_name(self) -> dict[str, TensorInfo]:
        stored: dict[str, TensorInfo] = {}
        for info in self._header.tensors.values():
            if info.name in _IN_CONFIG:
                continue
            name = canonical_name(info.name)
            if name is None:
                raise CheckpointError(
                    self.path,
                    f"tensor {info.name!r} has no place in a {self.config.architecture} model",
                )
            stored[name] = info
        return stored

    def _main_type(self) -> str:
        """The type that most bytes of the file are in."""
        sizes: Counter[str] = Counter()
        for info in self._stored.values():
            sizes[info.block.name] += info.nbytes
        return sizes.most_common(1)[0][0]

    def tensors(self) -> Iterator[Tensor]:
        """Every weight, in file order."""
        import numpy as np

        for name, info in self._stored.items():
            data = np.frombuffer(self._header.buffer, np.uint8, info.nbytes, info.offset)
            yield Tensor(
                name,
                info.shape,
                info.block,
                data.reshape(*info.shape[:-1], -1),
                self._row_order(name),
            )

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        if self.config.architecture != "llama":
            return None
        projection = name.split(".")[-2]
        if projection == "q_proj":
            return interleaved_row_order(self.config.num_heads, self.config.head_dim)
        if projection == "k_proj":
            return interleaved_row_order(self.config.num_kv_heads, self.config.head_dim)
        return None

    def _read_tokenizer(self) -> TokenizerData:
        return self._tokenizer.data()
