"""A model in a Hugging Face folder: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.checkpoint.embedding import folder_pooling
from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.hf_config import JsonFile, read_config
from phloem.srt.checkpoint.hf_tokenizer import HfTokenizer
from phloem.srt.checkpoint.safetensors_file import read_safetensors
from phloem.srt.checkpoint.shapes import check_tensors
from phloem.srt.checkpoint.tensors import Tensor, TensorInfo
from phloem.srt.checkpoint.tokenizer_data import TokenizerData

_INDEX = "model.safetensors.index.json"
_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class HfCheckpoint(Checkpoint):
    """Weights stay where they are: `Tensor.data` are views of the mapped files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        config = JsonFile.read(folder / "config.json")
        generation = JsonFile.read(folder / "generation_config.json", optional=True)
        self._tokenizer = HfTokenizer(folder)
        pooling = folder_pooling(folder, config)
        plain = read_config(
            config,
            generation,
            tokenizer_eos=self._tokenizer.eos_id,
            bos_id=self._tokenizer.bos_id,
            add_bos=self._tokenizer.add_bos,
        )
        end_id = None if pooling is None else self._tokenizer.end_id
        self.config = replace(plain, pooling=pooling, end_id=end_id)
        self._check_vocabulary(len(self._tokenizer.texts))
        self._stored = self._read_headers()
        check_tensors(
            folder, self.config, {name: info.shape for name, (_, info) in self._stored.items()}
        )
        self.format = f"safetensors {self._main_type()}"

    def _check_vocabulary(self, tokens: int) -> None:
        if tokens > self.config.vocab_size:
            raise CheckpointError(
                self.path / "tokenizer.json",
                f"{tokens} tokens, but config.json says vocab_size {self.config.vocab_size}",
            )
        if max(self.config.eos_ids) >= tokens:
            raise CheckpointError(
                self.path / "config.json",
                f"eos_token_id {max(self.config.eos_ids)} is not one of the {tokens} tokens",
            )

    def _read_headers(self) -> dict[str, tuple[mmap.mmap, TensorInfo]]:
        stored: dict[str, tuple[mmap.mmap, TensorInfo]] = {}
        for path in self._files():
            buffer, tensors = read_safetensors(path)
            for name, info in tensors.items():
                if name in stored:
                    raise CheckpointError(path, f"tensor {name!r} is in another file too")
                if not self._derived(name):
                    stored[name] = buffer, info
        if any(name.startswith("model.") for name in stored):
            return stored
        return {f"model.{name}": found for name, found in stored.items()}  # saved without its head

    def _derived(self, name: str) -> bool:
        """Tensors that old checkpoints store though they follow from others."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        return name == "lm_head.weight" and self.config.tie_embeddings

    def _files(self) -> list[Path]:
        """The files that the index names, or all there are."""
        index = JsonFile.read(self.path / _INDEX, optional=True).child("weight_map")
        if index is None:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(self.path, "no *.safetensors file (pickles are not read)")
            return files
        names = set(index.values.values())
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(index.path, f"{name!r} is not the name of a file beside it")
        return [self.path / name for name in sorted(names)]

    def _main_type(self) -> str:
        """The type that most bytes are in."""
        sizes: Counter[str] = Counter()
        for _, info in self._stored.values():
            sizes[info.block.name] += info.nbytes
        return _FORMATS[sizes.most_common(1)[0][0]]

    def tensors(self) -> Iterator[Tensor]:
        """Every weight, file by file."""
        import numpy as np

        for name, (buffer, info) in self._stored.items():
            data = np.frombuffer(buffer, np.uint8, info.nbytes, info.offset)
            yield Tensor(name, info.shape, info.block, data.reshape(*info.shape[:-1], -1))

    def _read_tokenizer(self) -> TokenizerData:
        return self._tokenizer.data()
