"""Which type a tensor gets."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from phloem.srt.checkpoint.quant_types import F32
from phloem.srt.cli.quantize import ElementType
from phloem.srt.quantize.encode import TYPES
from phloem.srt.quantize.plan import notices, plan
from phloem.srt.quantize.source import StoredTensor


def matrix(row: int, name: str = "blk.0.ffn_up.weight") -> StoredTensor:
    return StoredTensor(name, (2, row), F32, np.zeros((2, 4 * row), np.uint8))


def test_command_line_offers_every_type() -> None:
    assert set(get_args(ElementType)) == TYPES.keys()


@pytest.mark.parametrize("kind", TYPES)
def test_types_give_way_only_where_their_blocks_do_not_fit(kind: str) -> None:
    by_row = {256: kind, 96: {"Q4_K": "Q4_1", "Q5_K": "Q8_0", "Q6_K": "Q8_0"}.get(kind, kind)}
    by_row[40] = kind if TYPES[kind].elements == 1 else "F16"
    targets = plan([matrix(row) for row in by_row], kind, kind)
    assert [target.block.name for target in targets] == list(by_row.values())
    for target in targets:
        assert target.nbytes == 2 * target.row_nbytes
    told = [text.split(", whose")[0] for text in notices(targets, kind, kind)]
    assert told == [
        f"1 tensor in {taken} instead of {kind}" for taken in by_row.values() if taken != kind
    ]


def test_vectors_stay_float32_whatever_their_name() -> None:
    vector = StoredTensor("output_norm.weight", (256,), TYPES["F16"], np.zeros(512, np.uint8))
    (target,) = plan([vector], "Q8_0", "Q8_0")
    assert target.block == F32
    assert notices([target], "Q8_0", "Q8_0") == []
