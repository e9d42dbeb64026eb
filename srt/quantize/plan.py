"""Which tensor is written in which type.

Matrices get the type asked for; vectors (norms, biases, rotary divisors) are few, and stay F32.
A type whose blocks do not divide the rows gives way to one whose blocks do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phloem.srt.checkpoint.quant_types import F16, F32, BlockType
from phloem.srt.quantize.encode import TYPES
from phloem.srt.quantize.source import StoredTensor

_FALLBACKS = {"Q4_K": "Q4_1", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}
"""Types of 32 elements a block, none with less precision: Q4_1 has a minimum in each block, as Q4_K
does; of the types above Q5_K and Q6_K, Q8_0 is the one the kernels compute on."""

_EMBEDDINGS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Target:
    """A tensor of the source and the type it is written in."""

    tensor: StoredTensor
    block: BlockType

    @property
    def copied(self) -> bool:
        """Whether the source has it in this type already: its bytes are taken as they are."""
        return self.block == self.tensor.block

    @property
    def row_nbytes(self) -> int:
        return self.tensor.shape[-1] // self.block.elements * self.block.nbytes

    @property
    def nbytes(self) -> int:
        return self.tensor.elements // self.block.elements * self.block.nbytes


def plan(tensors: Sequence[StoredTensor], kind: str, embedding_kind: str) -> list[Target]:
    """The type of each tensor; `embedding_kind` is for the token embedding and the output."""
    targets = []
    for tensor in tensors:
        if len(tensor.shape) < 2:
            block = F32
        else:
            asked = TYPES[embedding_kind if tensor.name in _EMBEDDINGS else kind]
            block = _fitting(asked, tensor.shape[-1])
        targets.append(Target(tensor, block))
    return targets


def notices(targets: Sequence[Target], kind: str, embedding_kind: str) -> list[str]:
    """What the user should know: where another type was taken, and what was lossy before."""
    said = []
    fallen: Counter[tuple[str, str, int]] = Counter()
    again: Counter[str] = Counter()
    for target in targets:
        tensor = target.tensor
        if len(tensor.shape) < 2:
            continue
        asked = embedding_kind if tensor.name in _EMBEDDINGS else kind
        if target.block.name != asked:
            fallen[asked, target.block.name, tensor.shape[-1]] += 1
        if tensor.block.elements > 1 and not target.copied:
            again[tensor.block.name] += 1
    for (asked, taken, row), count in fallen.items():
        said.append(
            f"{_tensors(count)} in {taken} instead of {asked}, whose blocks of "
            f"{TYPES[asked].elements} do not divide rows of {row}"
        )
    for name, count in again.items():
        said.append(f"{_tensors(count)} converted from {name}: what that type lost stays lost")
    return said


def _fitting(asked: BlockType, row: int) -> BlockType:
    block = asked
    if row % block.elements and block.name in _FALLBACKS:
        block = TYPES[_FALLBACKS[block.name]]
    return F16 if row % block.elements else block


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"
