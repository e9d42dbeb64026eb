"""ModelConfig from the config.json and generation_config.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from phloem.srt.checkpoint.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from phloem.srt.checkpoint.errors import CheckpointError

T = TypeVar("T", int, float, bool, str)


class JsonFile:
    """A JSON object from a file, read by key with the type it must have."""

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self.where = where

    @classmethod
    def read(cls, path: Path, *, optional: bool = False) -> JsonFile:
        """Parse the file; a missing `optional` one is an empty object."""
        if optional and not path.exists():
            return cls(path, {})
        try:
            values = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise CheckpointError(path, error.strerror or "cannot be read") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise CheckpointError(path, f"not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(path, "not a JSON object")
        return cls(path, values)

    def fail(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(self.path, f"{self.where}{key} {reason}")

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, None when it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(key, f"is not of type {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; without a default its absence is an error."""
        value = self.find(key, kind)
        if value is not None:
            return value
        if default is None:
            raise self.fail(key, "is missing")
        return default

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value <= 0:
            raise self.fail(key, f"is {value}")
        return value

    def ids(self, key: str) -> list[int]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.fail(key, "is not a token id or a list of them")
        return ids

    def child(self, key: str) -> JsonFile | None:
        """The object under `key`, None when it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "is not an object")
        return JsonFile(self.path, value, f"{self.where}{key}.")


def read_config(
    config: JsonFile,
    generation: JsonFile,
    *,
    tokenizer_eos: int | None,
    bos_id: int | None,
    add_bos: bool,
) -> ModelConfig:
    """Dimensions as config.json gives them, with each architecture's own defaults.

    Raises:
        CheckpointError: unsupported architecture or feature, missing or impossible value.
    """
    architecture = _architecture(config)
    num_heads = config.positive("num_attention_heads")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    hidden_size = config.positive("hidden_size")
    head_dim = config.positive("head_dim", hidden_size // num_heads)
    num_layers = config.positive("num_hidden_layers")
    positions = config.positive("max_position_embeddings")
    rope = _rope(config, positions)
    biased = config.get("attention_bias", bool, False)
    eos_ids = [*config.ids("eos_token_id"), *generation.ids("eos_token_id")]
    if tokenizer_eos is not None:
        eos_ids.append(tokenizer_eos)
    if not eos_ids:
        raise config.fail("eos_token_id", "is missing: no file names an end token")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_epsilon(config),
        rope=rope,
        context_length=_context_length(positions, rope),
        tie_embeddings=config.get("tie_word_embeddings", bool, False),
        attention_bias=architecture == "qwen2" or biased,
        attention_out_bias=architecture != "qwen2" and biased,
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(config, architecture, num_layers, positions),
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        bos_id=bos_id,
        add_bos=add_bos,
    )


def _architecture(config: JsonFile) -> str:
    model_type = config.get("model_type", str)
    if model_type not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise config.fail("model_type", f"{model_type!r} is not supported (supported: {supported})")
    if config.values.get("quantization_config"):
        raise config.fail(
            "quantization_config", "is not supported: use unquantised weights or GGUF"
        )
    if config.get("hidden_act", str, "silu") != "silu":
        raise config.fail("hidden_act", "other than 'silu' is not supported")
    if config.get("mlp_bias", bool, False):
        raise config.fail("mlp_bias", "is not supported")
    return model_type


def _epsilon(config: JsonFile) -> float:
    value = config.get("rms_norm_eps", float, 1e-6)
    if not 0 <= value < 1:
        raise config.fail("rms_norm_eps", f"is {value}")
    return value


def _sliding_window(
    config: JsonFile, architecture: str, num_layers: int, positions: int
) -> int | None:
    """The window if the model really uses one: Qwen files carry a number that is switched off."""
    window = config.find("sliding_window", int)
    if architecture == "llama" or not window or window >= positions:
        return None
    if architecture == "mistral":
        return window
    if not config.get("use_sliding_window", bool, False):
        return None
    full_layers = config.get("max_window_layers", int, num_layers)
    if full_layers >= num_layers:
        return None
    if full_layers > 0:
        raise config.fail("max_window_layers", "mixes window and full attention: not supported")
    return window


def _context_length(positions: int, rope: RopeConfig) -> int:
    """YaRN recipes leave max_position_embeddings at the length before the stretch."""
    if rope.scaling is RopeScaling.YARN and rope.original_context is not None:
        return max(positions, int(rope.original_context * rope.factor))
    return positions


def _rope(config: JsonFile, positions: int) -> RopeConfig:
    """`rope_parameters` (newer files), or `rope_theta` beside `rope_scaling`."""
    scaling = config.child("rope_parameters") or config.child("rope_scaling")
    theta = config.get("rope_theta", float, 10000.0)
    if scaling is None:
        return _checked(config, RopeConfig(theta=theta))
    theta = scaling.get("rope_theta", float, theta)
    if scaling.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise scaling.fail("partial_rotary_factor", "is not supported")
    kind = scaling.find("rope_type", str) or scaling.get("type", str, "default")
    if kind == "default":
        return _checked(config, RopeConfig(theta=theta))
    if kind not in ("linear", "llama3", "yarn"):
        raise scaling.fail("rope_type", f"{kind!r} is not supported (linear, llama3, yarn are)")
    original = config.find("original_max_position_embeddings", int)
    original = original or scaling.positive("original_max_position_embeddings", positions)
    factor = scaling.find("factor", float)
    if factor is None and kind == "yarn":
        factor = positions / original
    rope = RopeConfig(
        theta=theta,
        scaling=RopeScaling(kind),
        factor=scaling.get("factor", float, factor),
        original_context=original,
        low_freq_factor=scaling.get("low_freq_factor", float, 1.0 if kind != "llama3" else None),
        high_freq_factor=scaling.get("high_freq_factor", float, 4.0 if kind != "llama3" else None),
        beta_fast=scaling.get("beta_fast", float, 32.0),
        beta_slow=scaling.get("beta_slow", float, 1.0),
        mscale=scaling.find("mscale", float),
        mscale_all_dim=scaling.find("mscale_all_dim", float),
        truncate=scaling.get("truncate", bool, True),
        attention_factor=scaling.find("attention_factor", float),
    )
    return _checked(scaling, rope)


def _checked(file: JsonFile, rope: RopeConfig) -> RopeConfig:
    """Refuse numbers that no frequency can be computed from."""
    if not rope.theta > 1:
        raise file.fail("rope_theta", f"is {rope.theta}")
    if not rope.factor >= 1:
        raise file.fail("factor", f"is {rope.factor}")
    if not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise file.fail("low_freq_factor", "is not below high_freq_factor")
    if not 0 < rope.beta_slow <= rope.beta_fast:
        raise file.fail("beta_slow", "is above beta_fast")
    return rope
