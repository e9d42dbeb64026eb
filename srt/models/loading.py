"""From a checkpoint to a model that computes. No torch unless it is torch that computes."""

from __future__ import annotations

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.models.base import Model


def load(checkpoint: Checkpoint, *, dtype: str, kv_slots: int, threads: int) -> Model:
    """The checkpoint's model, computing in `dtype` ("float32" or "bfloat16") with `threads`, with
    a KV pool of `kv_slots` (slot 0, padding, included).

    Raises what the checkpoint or the memory make impossible.
    """
    from phloem.srt.models.torch_model import DTYPES, TorchModel

    return TorchModel.load(checkpoint, kv_slots=kv_slots, dtype=DTYPES[dtype], threads=threads)
