"""ModelConfig from the metadata and tensor table of a GGUF file."""

from __future__ import annotations

from typing import TypeVar

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig, RopeScaling
from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.gguf_header import GgufArray, GgufHeader

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture; mistral models are "llama" here."""

T = TypeVar("T", int, float, str, bool)


class Metadata:
    """Typed access to a header's metadata; `scoped` keys carry the architecture's prefix."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = self.get("general.architecture", str)

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(self.header.path, reason)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; without a default its absence is an error."""
        value = self.find(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.fail(f"metadata key {key!r} is missing")
        return default

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, None when the file has none."""
        value = self.header.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(f"metadata key {key!r} is not of type {kind.__name__}")
        return value

    def scoped(self, key: str, kind: type[T], default: T | None = None) -> T:
        return self.get(f"{self.architecture}.{key}", kind, default)

    def array(self, key: str) -> GgufArray | None:
        value = self.header.metadata.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self.fail(f"metadata key {key!r} is not an array")
        return value


def read_config(
    header: GgufHeader, eos_ids: tuple[int, ...], bos_id: int | None, add_bos: bool
) -> ModelConfig:
    """Dimensions by metadata, biases by which tensors exist.

    Raises:
        CheckpointError: unsupported architecture or feature, missing or impossible value.
    """
    meta = Metadata(header)
    _check_supported(meta)
    num_layers = _positive(meta, "block_count")
    if num_layers > len(header.tensors):
        raise meta.fail(f"{num_layers} layers cannot be in {len(header.tensors)} tensors")
    num_heads = _positive(meta, "attention.head_count")
    hidden_size = _positive(meta, "embedding_length")
    head_dim = meta.scoped("attention.key_length", int, hidden_size // num_heads)
    _check_head(meta, head_dim)
    context_length = _positive(meta, "context_length")
    window = meta.find(f"{meta.architecture}.attention.sliding_window", int)
    return ModelConfig(
        architecture=meta.architecture,
        vocab_size=_vocab_size(meta),
        hidden_size=hidden_size,
        intermediate_size=_positive(meta, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(meta, num_heads),
        head_dim=head_dim,
        rms_norm_eps=_epsilon(meta),
        rope=_rope(meta, head_dim, context_length),
        context_length=context_length,
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_out_bias="blk.0.attn_output.bias" in header.tensors,
        qk_norm=meta.architecture == "qwen3",
        sliding_window=window if window and 0 < window < context_length else None,
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=add_bos,
    )


def _check_supported(meta: Metadata) -> None:
    if meta.architecture not in GGUF_ARCHITECTURES:
        raise meta.fail(
            f"architecture {meta.architecture!r} is not supported "
            f"(supported: {', '.join(GGUF_ARCHITECTURES)})"
        )
    if meta.get("split.count", int, 1) > 1:
        raise meta.fail("a model split over several GGUF files is not supported: merge them first")
    if meta.scoped("expert_count", int, 0):
        raise meta.fail("mixture-of-experts models are not supported")


def _positive(meta: Metadata, key: str) -> int:
    value = meta.scoped(key, int)
    if value <= 0:
        raise meta.fail(f"metadata key {meta.architecture}.{key} is {value}")
    return value


def _epsilon(meta: Metadata) -> float:
    value = meta.scoped("attention.layer_norm_rms_epsilon", float)
    if not 0 <= value < 1:
        raise meta.fail(f"{meta.architecture}.attention.layer_norm_rms_epsilon is {value}")
    return value


def _kv_heads(meta: Metadata, num_heads: int) -> int:
    value = meta.scoped("attention.head_count_kv", int, num_heads)
    if value <= 0 or num_heads % value:
        raise meta.fail(f"{num_heads} query heads cannot share {value} key-value heads")
    return value


def _vocab_size(meta: Metadata) -> int:
    embedding = meta.header.tensors.get("token_embd.weight")
    if embedding is None:
        raise meta.fail("tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _check_head(meta: Metadata, head_dim: int) -> None:
    """All of a head rotates, and keys are as long as values."""
    if head_dim <= 0 or head_dim % 2:
        raise meta.fail(f"a head of {head_dim} dimensions is not supported")
    for key in ("rope.dimension_count", "attention.value_length"):
        if meta.scoped(key, int, head_dim) != head_dim:
            raise meta.fail(f"{meta.architecture}.{key} other than {head_dim} is not supported")


def _rope(meta: Metadata, head_dim: int, context_length: int) -> RopeConfig:
    theta = meta.scoped("rope.freq_base", float, 10000.0)
    if not theta > 1:
        raise meta.fail(f"{meta.architecture}.rope.freq_base is {theta}")
    kind = meta.scoped("rope.scaling.type", str, "none")
    factor = meta.scoped("rope.scaling.factor", float, 1.0)
    if kind == "none" and "rope_freqs.weight" in meta.header.tensors:
        return RopeConfig(
            theta=theta, scaling=RopeScaling.FACTORS, factors=_rope_factors(meta, head_dim)
        )
    if kind not in ("none", "linear", "yarn"):
        raise meta.fail(f"rope scaling {kind!r} is not supported (supported: linear, yarn)")
    if not factor > 0 and kind != "none":
        raise meta.fail(f"{meta.architecture}.rope.scaling.factor is {factor}")
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=factor)
    if meta.scoped("rope.scaling.yarn_log_multiplier", float, 0.0):
        raise meta.fail(f"{meta.architecture}.rope.scaling.yarn_log_multiplier is not supported")
    return _yarn(meta, theta, factor, context_length)


def _yarn(meta: Metadata, theta: float, factor: float, context_length: int) -> RopeConfig:
    from phloem.srt.checkpoint.rope import yarn_attention_factor

    weight = meta.scoped("rope.scaling.yarn_attn_factor", float, 1.0)
    weight *= meta.scoped("rope.scaling.attn_factor", float, 1.0)
    original = meta.scoped("rope.scaling.original_context_length", int, context_length)
    if original <= 0:
        raise meta.fail(f"{meta.architecture}.rope.scaling.original_context_length is {original}")
    return RopeConfig(
        theta=theta,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_context=original,
        beta_fast=meta.scoped("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=meta.scoped("rope.scaling.yarn_beta_slow", float, 1.0),
        attention_factor=weight * yarn_attention_factor(factor),
    )


def _rope_factors(meta: Metadata, head_dim: int) -> tuple[float, ...]:
    import numpy as np

    from phloem.srt.checkpoint.tensors import dequantize

    info = meta.header.tensors["rope_freqs.weight"]
    if info.shape != (head_dim // 2,) or info.block.name != "F32":
        raise meta.fail(f"tensor 'rope_freqs.weight' has shape {list(info.shape)}")
    data = np.frombuffer(meta.header.buffer, np.uint8, info.nbytes, info.offset)
    factors = tuple(float(value) for value in dequantize(data, info.block))
    if not all(value > 0 for value in factors):
        raise meta.fail("tensor 'rope_freqs.weight' has a divisor that is not positive")
    return factors
