"""Qwen2 and Qwen2.5 (arXiv:2407.10671). From Llama it differs in one thing:

- q, k and v have biases, which `config.attention_bias` says already.
"""

from __future__ import annotations

from phloem.srt.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with a biased qkv_proj."""
