"""What a model is loaded with."""

from __future__ import annotations

from typing import Literal

import msgspec


class ComputeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model computes, as `phloem.srt.resolve` chose it. `isa` names the cpu backend's
    kernels."""

    backend: Literal["cpu", "torch"]
    dtype: str
    kv_dtype: str
    quantization: Literal["int8", "int4"] | None
    isa: str
    threads: int
