"""A model computed by torch: the network, its KV pool and an attention backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from phloem.srt.attention.base import AttentionBackend, create_backend
from phloem.srt.attention.batch import AttentionBatch, AttentionDims
from phloem.srt.attention.kv_pool import KVPool
from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.models.base import check_kv_size
from phloem.srt.models.llama import LlamaForCausalLM
from phloem.srt.models.weights import Source, load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a model may compute in, by the name that options use."""


class TorchModel:
    """Implements `phloem.srt.models.base.Model`. `attention` works on `pool`.

    Hidden states leave and come back as float32 whatever the model computes in: bfloat16 survives
    that unchanged. Masks are not used: a dense product costs the same for all tokens.
    """

    def __init__(
        self, network: LlamaForCausalLM, attention: AttentionBackend, pool: KVPool
    ) -> None:
        self._network = network
        self._attention = attention
        self._pool = pool
        self._dtype = network.lm_head.weight.dtype

    @staticmethod
    def load(
        checkpoint: Source,
        *,
        kv_slots: int,
        dtype: torch.dtype = torch.float32,
        attention_backend: str = "torch_native",
        threads: int | None = None,
    ) -> TorchModel:
        """Load the weights and make a KV pool of `kv_slots` (slot 0, padding, included).

        `threads` sets torch's for the whole process; the environment should say
        OMP_WAIT_POLICY=PASSIVE before torch is imported. Raises `WeightsError`, and
        `AttentionError` for an unknown backend.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        config = checkpoint.config
        network = load_model(checkpoint, dtype)
        pool = KVPool.for_model(config, kv_slots, dtype)
        attention = create_backend(
            attention_backend,
            pool,
            AttentionDims(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                sliding_window=config.sliding_window,
            ),
        )
        return TorchModel(network, attention, pool)

    @property
    def config(self) -> ModelConfig:
        return self._network.config

    def forward(
        self, token_ids: NDArray[np.int32], positions: NDArray[np.int32], batch: AttentionBatch
    ) -> NDArray[np.float32]:
        with torch.inference_mode():
            hidden = self._network(
                torch.from_numpy(token_ids.astype(np.int64)),
                torch.from_numpy(positions.astype(np.int64)),
                self._attention.plan(batch),
            )
            array: NDArray[np.float32] = hidden.float().numpy()
        return array

    def logits(
        self,
        hidden: NDArray[np.float32],
        masks: Sequence[NDArray[np.int32] | None] | None = None,
    ) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = self._network.logits(torch.from_numpy(hidden).to(self._dtype))
            array: NDArray[np.float32] = logits.contiguous().numpy()
        return array

    @property
    def kv_slot_bytes(self) -> int:
        return self._pool.slot_bytes

    def read_kv(self, slots: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        check_kv_size(self.kv_slot_bytes, slots, out)
        with torch.inference_mode():
            self._pool.read_slots(slots, out)

    def write_kv(self, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        check_kv_size(self.kv_slot_bytes, slots, data)
        with torch.inference_mode():
            self._pool.write_slots(slots, data)
