"""Weights from a checkpoint into a model, tensor by tensor.

A checkpoint names tensors as Hugging Face does; a model names its parameters the same way, except
that it fuses some (`fused` on the class). Every tensor must have a place and every place a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.models.layers import Linear
from phloem.srt.models.llama import LlamaForCausalLM
from phloem.srt.models.registry import model_class

NAMES_SHOWN = 5


class WeightsError(Exception):
    """Tensors are missing, left over, or of the wrong shape; the message names them."""


class SourceTensor(Protocol):
    """A tensor of a checkpoint."""

    @property
    def name(self) -> str: ...

    def numpy_float32(self) -> NDArray[np.float32]: ...


class Source(Protocol):
    """A checkpoint, as far as loading needs it."""

    @property
    def config(self) -> ModelConfig: ...

    def tensors(self) -> Iterable[SourceTensor]: ...


@dataclass(frozen=True)
class _Place:
    """Rows [start, start + rows) of parameter `kind` of `module`."""

    module: nn.Module
    kind: str
    start: int
    rows: int

    def parameter(self) -> nn.Parameter:
        """The parameter, given memory when it has none yet."""
        parameter: nn.Parameter = getattr(self.module, self.kind)
        if parameter.is_meta:
            # not empty_like: of a meta tensor it imports sympy, which takes a second
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            parameter = nn.Parameter(memory, requires_grad=False)
            setattr(self.module, self.kind, parameter)
        return parameter


def load_model(checkpoint: Source, dtype: torch.dtype) -> LlamaForCausalLM:
    """Build the checkpoint's model and fill it, computing in `dtype`.

    One tensor at a time is held in float32, and a linear layer is packed as soon as its last part
    is there: the peak is little more than the packed model, and pages are used again while they
    are warm. Raises `WeightsError`.
    """
    with torch.inference_mode():
        with torch.device("meta"):
            model = model_class(checkpoint.config.architecture)(checkpoint.config, dtype)
        places = dict(_places(model))
        awaited = Counter(place.module for place in places.values())
        surplus: list[str] = []
        for tensor in checkpoint.tensors():
            place = places.pop(tensor.name, None)
            if place is None:
                surplus.append(tensor.name)
                continue
            _fill(place, tensor)
            awaited[place.module] -= 1
            if isinstance(place.module, Linear) and not awaited[place.module]:
                place.module.pack()
        if places or surplus:
            raise WeightsError(_mismatch(list(places), surplus))
        if checkpoint.config.tie_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
            model.lm_head.pack()
    return model.eval()


def _places(model: LlamaForCausalLM) -> Iterator[tuple[str, _Place]]:
    """Checkpoint tensor name → where it goes. A tied head has no tensor of its own."""
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        parent, _, own = path.rpartition(".")
        if own in model.fused and isinstance(module, Linear):
            start = 0
            for part, rows in zip(model.fused[own], module.parts, strict=True):
                yield f"{parent}.{part}.{kind}", _Place(module, kind, start, rows)
                start += rows
        else:
            yield name, _Place(module, kind, 0, len(parameter))


def _fill(place: _Place, tensor: SourceTensor) -> None:
    values = torch.from_numpy(tensor.numpy_float32())
    target = place.parameter()[place.start : place.start + place.rows]
    if values.shape != target.shape:
        raise WeightsError(
            f"{tensor.name} has shape {tuple(values.shape)}, the model {tuple(target.shape)}"
        )
    target.copy_(values)


def _mismatch(missing: list[str], surplus: list[str]) -> str:
    reasons = []
    for what, names in (("missing", missing), ("not used by the model", surplus)):
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            reasons.append(f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}")
    return f"weights do not fit the model; {'; '.join(reasons)}"
