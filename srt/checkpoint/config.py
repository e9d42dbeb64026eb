"""Dimensions and constants of a model, whatever file they came from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phloem.srt.messages import Pooling


class RopeScaling(enum.StrEnum):
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    NONE = "none"
    LINEAR = "linear"
    """All frequencies divided by `factor` (position interpolation)."""
    LLAMA3 = "llama3"
    """Low frequencies divided by `factor`, high ones kept, a smooth blend between."""
    YARN = "yarn"
    """NTK-by-parts blend with a ramp over dimensions (arXiv:2309.00071), cos and sin scaled."""
    FACTORS = "factors"
    """One divisor a frequency, stored in the file (how GGUF carries llama3 scaling)."""


KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a number, by the type that keys and values are kept in."""
KV_SCALE_BYTES = {"int8": 4}
"""Bytes beside each head's, for types that need a scale."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding in half-split ("NeoX") layout over the whole head.

    `original_context` is the context before scaling (llama3 and yarn). `attention_factor` None
    means that it follows from the others (yarn only, 1 otherwise).
    """

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family: pre-norm RMSNorm, rotary attention, gated SiLU MLP.

    `architecture` is one of `SUPPORTED_ARCHITECTURES`. `vocab_size` is the number of rows of the
    embedding, which may exceed the tokenizer's. `head_dim` need not be hidden_size / num_heads
    (Qwen3). `attention_bias` is about q, k and v, `attention_out_bias` about o. `qk_norm` is an
    RMSNorm over each head of q and k before rotation. `sliding_window` is None unless every layer
    attends to that many tokens only. `context_length` counts tokens, rope scaling included.
    `eos_ids` are all ids that end a sequence, the main one first; `add_bos` says that a prompt
    begins with `bos_id`. A model that was made for embeddings has its `pooling`, and `end_id` if a
    text that is embedded ends with one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    tie_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    hidden_act: str = "silu"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    pooling: Pooling | None = None
    end_id: int | None = None

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def kv_slot_bytes(self, kv_dtype: str) -> int:
        """Bytes of one token's keys and values over all layers, kept in `kv_dtype`."""
        head = self.head_dim * KV_ITEM_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0)
        return 2 * self.num_layers * self.num_kv_heads * head


SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
