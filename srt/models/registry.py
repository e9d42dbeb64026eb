"""Architecture → model class, imported on first use."""

from __future__ import annotations

import importlib
from typing import cast

from phloem.srt.models.llama import LlamaForCausalLM

MODELS = {
    "llama": "phloem.srt.models.llama:LlamaForCausalLM",
    "mistral": "phloem.srt.models.llama:LlamaForCausalLM",
    "qwen2": "phloem.srt.models.qwen2:Qwen2ForCausalLM",
    "qwen3": "phloem.srt.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class that computes `architecture` (as `ModelConfig.architecture` spells it).

    Raises `ValueError`, with the known names, for any other.
    """
    if architecture not in MODELS:
        raise ValueError(f"no model for {architecture!r}; there are: {', '.join(MODELS)}")
    module, _, attribute = MODELS[architecture].partition(":")
    return cast("type[LlamaForCausalLM]", getattr(importlib.import_module(module), attribute))
