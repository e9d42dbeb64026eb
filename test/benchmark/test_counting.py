"""What the roofline counts, against the library's own sizes and against sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from counting import LAYOUTS, AttentionShape, Row, Weight, Work, head, step

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.kernels.cpu.library import KernelsUnavailable, Matrix, Team, library

# Two layers; a head is 16 wide, so that nothing is padded.
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=128,
    tie_embeddings=True,
)
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
WEIGHTS = {"model.embed_tokens.weight": Weight("Q8_0", 320, 64)} | {
    f"model.layers.{layer}.{name}.weight": Weight("Q8_0", *shape)
    for layer in range(2)
    for name, shape in SHAPES.items()
}
# A byte a weight, and 8 for each output.
LAYER_WEIGHTS = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64
LAYER_BYTES = LAYER_WEIGHTS + 8 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
HEAD_BYTES = 320 * (64 + 8)


@pytest.mark.parametrize("format", LAYOUTS)
def test_weights_take_as_many_bytes_as_the_library_says(format: str) -> None:
    try:
        row_bytes = library().phloem_row_bytes(format.encode(), 768)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    rows = np.arange(33, dtype=np.int32)
    matrix = Matrix(format, np.zeros((33, row_bytes), np.uint8), 768, rows, Team(1))
    assert Weight(format, 33, 768).product(1).nbytes == matrix.nbytes


def test_columns_are_filled_up_to_steps() -> None:
    # 96 columns are two steps of 64, and one span.
    assert LAYOUTS["Q4_1"].nbytes(16, 96) == 16 * (128 + 8)
    assert LAYOUTS["int8"].nbytes(17, 1536) == 32 * (1536 + 2 * 8)


def test_a_product_multiplies_in_the_type_its_weights_are_kept_for() -> None:
    assert Weight("Q4_1", 16, 64).product(3) == Work(16 * (64 + 8), int8=2 * 16 * 64 * 3)
    assert Weight("BF16", 16, 64).product(3) == Work(16 * 64 * 2, float32=16 * 64 * 3)


def test_new_tokens_see_the_old_ones_and_each_other_causally() -> None:
    assert Row(1, 10).seen == 10
    assert Row(3, 3).seen == 1 + 2 + 3
    assert Row(2, 6).seen == 5 + 6


@pytest.mark.parametrize(
    ("kv_dtype", "nbytes"),
    [("float32", 2 * 3 * 80 * 4), ("float16", 2 * 3 * 80 * 2), ("int8", 2 * 3 * (80 + 4))],
)
def test_a_token_of_kv_is_padded_to_vectors_and_int8_has_scales(kv_dtype: str, nbytes: int) -> None:
    assert AttentionShape(6, 3, 72, kv_dtype).token_bytes == nbytes


def test_logits_are_written() -> None:
    assert head(WEIGHTS["model.embed_tokens.weight"], 2) == Work(
        HEAD_BYTES + 2 * 320 * 4, int8=2 * 2 * 320 * 64
    )


def test_a_decode_step_reads_all_weights_once_and_each_rows_kv() -> None:
    # A token's KV: 2 · 2 heads · 16 · 2 bytes a layer. Rows of 10 and 20 tokens.
    assert step(CONFIG, WEIGHTS, [Row(1, 10), Row(1, 20)], "float16") == Work(
        2 * LAYER_BYTES + HEAD_BYTES + 2 * 320 * 4 + 2 * (10 + 20) * 128,
        int8=2 * 2 * (2 * LAYER_WEIGHTS + 320 * 64),
        float32=2 * (10 + 20) * 2 * 4 * 16,
    )


def test_a_prefill_computes_every_token_but_one_row_of_logits() -> None:
    assert step(CONFIG, WEIGHTS, [Row(3, 3)], "float16") == Work(
        2 * LAYER_BYTES + HEAD_BYTES + 320 * 4 + 2 * 3 * 128,
        int8=2 * (3 * 2 * LAYER_WEIGHTS + 320 * 64),
        float32=2 * (1 + 2 + 3) * 2 * 4 * 16,
    )


def test_tiles_multiply_bfloat16() -> None:
    rows = [Row(2, 5)]
    products = 2 * (4 + 5) * 6 * 64
    nbytes = 5 * 2 * 3 * 64 * 2
    for kv_dtype, dim, tiles in [("bfloat16", 64, False), ("float16", 64, True)]:
        shape = AttentionShape(6, 3, dim, kv_dtype, tiles)
        assert shape.attend(rows) == Work(nbytes, float32=products)
    assert AttentionShape(6, 3, 64, "bfloat16", True).attend(rows) == Work(
        nbytes, bfloat16=products
    )
    rates = {"int8": 1.0, "float32": 1.0, "bfloat16": 100.0}
    assert Work(1, bfloat16=500).seconds(1.0, rates) == (5.0, "arithmetic")


def test_the_slower_of_memory_and_arithmetic_sets_the_least_time() -> None:
    work = Work(1000, int8=300, float32=50)
    rates = {"int8": 100.0, "float32": 10.0}
    assert work.seconds(1000.0, rates) == (8.0, "arithmetic")
    assert work.seconds(10.0, rates) == (100.0, "memory")
