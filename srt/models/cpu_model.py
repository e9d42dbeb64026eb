"""A model computed by the CPU kernels: weights stay integers where the checkpoint has integers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.checkpoint.rope import rope_frequencies
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.kernels.cpu.library import (
    KV_TYPES,
    Decoder,
    DecoderSpec,
    Kernels,
    LayerSpec,
    Matrix,
    Team,
    address,
)
from phloem.srt.models.base import check_kv_size

log = logging.getLogger(__name__)

LANES = 16
MOST_AS_BYTES = 1 << 30
"""Weights up to which those of 4 bits are kept as bytes: more would cost too much memory, and the
time to read it."""
WORTH_NARROWING = 0.7
"""Of a vocabulary, in words of its masks: where more is wanted by some row, all is computed."""
FLOAT_FORMATS = frozenset({"F32", "F16", "BF16"})
_KERNEL_FORMATS = FLOAT_FORMATS | {
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
}

Quantization = Literal["int8", "int4"]
Number = TypeVar("Number", np.int32, np.float32)


class Source(Protocol):
    """A checkpoint, as far as loading needs it."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Iterable[Tensor]: ...


class CpuModel:
    """Implements `phloem.srt.models.base.Model`.

    `kv_slots` counts slot 0, padding, in; KV is kept in `kv_dtype` (float32, float16, bfloat16,
    int8 with one scale a token and head). `quantization` turns float weights into int8 with one
    scale for up to 768 columns, or int4 in groups of 32. `isa` names the kernels (by default see
    `Kernels`). `nibbles` keeps weights of 4 bits as they are, not as bytes (by default if there are
    more than `MOST_AS_BYTES`): results are the same.

    A row's results are the same bits in any batch, with any number of `threads`, and on any
    instruction set, but that "amx" has bits of its own where KV is bfloat16. Raises
    `KernelsUnavailable`, `KernelError` when memory runs out, and `ValueError` when weights that are
    quantised already, or not finite, are to be quantised.
    """

    def __init__(
        self,
        checkpoint: Source,
        *,
        kv_slots: int,
        kv_dtype: str = "float32",
        quantization: Quantization | None = None,
        threads: int = 1,
        context_length: int | None = None,
        isa: str | None = None,
        nibbles: bool | None = None,
    ) -> None:
        self._config = config = checkpoint.config
        self._nibbles = _weights(config) > MOST_AS_BYTES if nibbles is None else nibbles
        self._logits = np.empty((0, config.vocab_size), np.float32)
        self._kernels = Kernels(isa)
        self._team = Team(threads)
        self._quantization = quantization
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._widened: set[str] = set()
        for tensor in checkpoint.tensors():
            self._load(tensor)
        self._tell_of_widened()
        missing = expected_tensors(config).keys() - self._matrices.keys() - self._vectors.keys()
        if missing:
            raise ValueError(f"weights are missing: {', '.join(sorted(missing)[:5])}")
        context = context_length or config.context_length
        self._cos, self._sin = _rotations(config, context)
        layers = (LayerSpec * config.num_layers)(
            *(self._layer(f"model.layers.{i}.") for i in range(config.num_layers))
        )
        embedding = self._matrices["model.embed_tokens.weight"]
        head = embedding if config.tie_embeddings else self._matrices["lm_head.weight"]
        spec = DecoderSpec(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            context=context,
            slots=kv_slots,
            kv_type=KV_TYPES[kv_dtype],
            window=config.sliding_window or 0,
            eps=config.rms_norm_eps,
            soft_cap=0.0,
            cos=address(self._cos),
            sin=address(self._sin),
            embedding=embedding.handle,
            head=head.handle,
            norm=address(self._vectors["model.norm.weight"]),
            layer=layers,
        )
        pointed_to = (self._matrices, self._vectors, self._cos, self._sin, layers)
        self._decoder = Decoder(spec, pointed_to, self._kernels, self._team)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def isa(self) -> str:
        """Name of the kernels that compute."""
        return self._kernels.isa

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take, repacked."""
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def forward(
        self, token_ids: NDArray[np.int32], positions: NDArray[np.int32], batch: AttentionBatch
    ) -> NDArray[np.float32]:
        hidden = np.empty((len(token_ids), self._config.hidden_size), np.float32)
        self._decoder.step(token_ids, positions, batch.query_lens, batch.kv_slots, hidden)
        return hidden

    def logits(
        self,
        hidden: NDArray[np.float32],
        masks: Sequence[NDArray[np.int32] | None] | None = None,
    ) -> NDArray[np.float32]:
        # Fresh memory for every step would be cleared by the system, page after page.
        if len(self._logits) < len(hidden):
            self._logits = np.empty((len(hidden), self._config.vocab_size), np.float32)
        out = self._logits[: len(hidden)]
        if not len(hidden):
            return out
        self._decoder.logits(hidden, masks if self._narrows(masks) else None, out)
        return out

    def _narrows(self, masks: Sequence[NDArray[np.int32] | None] | None) -> bool:
        """Whether leaving out what the masks forbid takes less time than computing all logits.
        Where matrices are multiplied in tiles of rows, a row more costs next to nothing: only what
        no row wants is a gain, and picking rows out costs some."""
        given = [mask for mask in masks or () if mask is not None]
        if not given or self.isa != "amx":
            return bool(given)
        if masks is not None and len(given) < len(masks):
            return False
        wanted = np.count_nonzero(np.bitwise_or.reduce(given))
        return bool(wanted < len(given[0]) * WORTH_NARROWING)

    @property
    def kv_slot_bytes(self) -> int:
        return self._decoder.kv_slot_bytes

    def read_kv(self, slots: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        check_kv_size(self.kv_slot_bytes, slots, out)
        self._decoder.read_kv(slots, out)

    def write_kv(self, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        check_kv_size(self.kv_slot_bytes, slots, data)
        self._decoder.write_kv(slots, data)

    def _load(self, tensor: Tensor) -> None:
        kind = tensor.name.rsplit(".", 2)[-2]
        of_heads = kind in ("q_proj", "k_proj", "v_proj")
        if len(tensor.shape) == 1:
            values = tensor.numpy_float32()
            self._vectors[tensor.name] = (
                _padded(values, self._config.head_dim) if of_heads else values
            )
            return
        rows = np.arange(tensor.shape[0], dtype=np.int32)
        if tensor.row_order is not None:
            rows = tensor.row_order.astype(np.int32)
        if of_heads:
            rows = _padded(rows, self._config.head_dim, padding=-1)
        format, data = self._stored(tensor)
        self._matrices[tensor.name] = Matrix(
            format, data, tensor.shape[1], rows, self._team, nibbles=self._nibbles
        )

    def _stored(self, tensor: Tensor) -> tuple[str, NDArray[np.uint8]]:
        """The kernels' format for a tensor, and its rows in it, in stored order."""
        plain = Tensor(tensor.name, tensor.shape, tensor.block, tensor.data)
        if self._quantization is not None:
            if tensor.kind not in FLOAT_FORMATS:
                raise ValueError(
                    f"{tensor.name} is {tensor.kind} already: only float weights can be "
                    f"quantised to {self._quantization}"
                )
            values = plain.numpy_float32()
            if not np.isfinite(values).all():
                raise ValueError(f"{tensor.name} has values that are not finite")
            return self._quantization, values.view(np.uint8)
        if tensor.kind in _KERNEL_FORMATS:
            return tensor.kind, tensor.data
        self._widened.add(tensor.kind)
        return "F32", plain.numpy_float32().view(np.uint8)

    def _tell_of_widened(self) -> None:
        if self._widened:
            log.warning(
                "no kernel for %s: these weights are kept as float32, which takes more memory",
                ", ".join(sorted(self._widened)),
            )

    def _layer(self, prefix: str) -> LayerSpec:
        def matrix(name: str) -> int | None:
            return self._matrices[f"{prefix}{name}.weight"].handle

        def vector(name: str) -> int | None:
            found = self._vectors.get(prefix + name)
            return None if found is None else address(found)

        return LayerSpec(
            q=matrix("self_attn.q_proj"),
            k=matrix("self_attn.k_proj"),
            v=matrix("self_attn.v_proj"),
            o=matrix("self_attn.o_proj"),
            gate=matrix("mlp.gate_proj"),
            up=matrix("mlp.up_proj"),
            down=matrix("mlp.down_proj"),
            attention_norm=vector("input_layernorm.weight"),
            mlp_norm=vector("post_attention_layernorm.weight"),
            q_norm=vector("self_attn.q_norm.weight"),
            k_norm=vector("self_attn.k_norm.weight"),
            q_bias=vector("self_attn.q_proj.bias"),
            k_bias=vector("self_attn.k_proj.bias"),
            v_bias=vector("self_attn.v_proj.bias"),
            o_bias=vector("self_attn.o_proj.bias"),
        )


def _weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def _padded(values: NDArray[Number], head_dim: int, padding: int = 0) -> NDArray[Number]:
    """Values of each dimension of all heads, every head padded to whole vectors."""
    heads = values.reshape(-1, head_dim)
    return np.pad(heads, ((0, 0), (0, -head_dim % LANES)), constant_values=padding).reshape(-1)


def _rotations(
    config: ModelConfig, context: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [context, head_dim / 2], computed in float64."""
    frequencies, factor = rope_frequencies(config)
    angles = np.outer(np.arange(context, dtype=np.float64), frequencies)
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return cos.astype(np.float32), sin.astype(np.float32)
