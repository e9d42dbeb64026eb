"""From a checkpoint to a model that computes. No torch unless it is torch that computes."""

from __future__ import annotations

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.models.base import Model
from phloem.srt.models.options import ComputeOptions


def load(
    checkpoint: Checkpoint, options: ComputeOptions, *, kv_slots: int, context_length: int
) -> Model:
    """The checkpoint's model, computing as `options` say, with a KV pool of `kv_slots` (slot 0,
    padding, included) for sequences of at most `context_length` tokens.

    Raises what the checkpoint or the memory make impossible.
    """
    if options.backend == "cpu":
        from phloem.srt.models.cpu_model import CpuModel

        return CpuModel(
            checkpoint,
            kv_slots=kv_slots,
            kv_dtype=options.kv_dtype,
            quantization=options.quantization,
            threads=options.threads,
            context_length=context_length,
            isa=options.isa,
        )
    from phloem.srt.models.torch_model import DTYPES, TorchModel

    return TorchModel.load(
        checkpoint, kv_slots=kv_slots, dtype=DTYPES[options.dtype], threads=options.threads
    )
