"""Model files: configuration, token table and weights, from GGUF or Hugging Face checkpoints.

No torch, and no numpy until weights are read: the frontend and the grammar process open the
checkpoint too, for its tokenizer.
"""

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.checkpoint.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.opening import open_checkpoint
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.checkpoint.tokenizer_data import TokenizerData

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "RopeConfig",
    "RopeScaling",
    "Tensor",
    "TokenizerData",
    "expected_tensors",
    "open_checkpoint",
]
