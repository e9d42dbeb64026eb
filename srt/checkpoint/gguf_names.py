"""GGUF tensor names → canonical names, and the row order of q and k in llama files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def canonical_name(name: str) -> str | None:
    """The canonical name of a GGUF tensor, None for one that is not known."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def interleaved_row_order(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Stored row of each canonical row, for q or k of a llama file.

    Within a head, stored row `2 j + s` is canonical row `s * head_dim / 2 + j`: the pair that
    rotates together lies side by side in the file, half a head apart in canonical order.
    """
    import numpy as np

    within = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)
