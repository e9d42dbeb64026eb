"""Writes models as GGUF files of smaller element types, and measures what that costs.

No torch: weights go through numpy, and perplexity through the engine, which computes elsewhere.
"""

from phloem.srt.quantize.conversion import Summary, check_target, convert
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.perplexity import perplexity
from phloem.srt.quantize.sample import sample_text

__all__ = [
    "QuantizeError",
    "Summary",
    "check_target",
    "convert",
    "perplexity",
    "sample_text",
]
