"""Text ↔ tokens: encoding, incremental detokenisation, stop strings, chat templates.

No torch and no transformers; the `tokenizers` library encodes, the token table decodes.
"""

from phloem.srt.tokenizer.detokenize import IncrementalDetokenizer, StopStrings
from phloem.srt.tokenizer.template import ChatTemplate, RenderedPrompt, load_chat_template
from phloem.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "RenderedPrompt",
    "StopStrings",
    "Tokenizer",
    "load_chat_template",
    "load_tokenizer",
]
