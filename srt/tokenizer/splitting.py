"""How text is split into words before byte-level BPE, by the name GGUF gives the rule.

The patterns are those of the models' own tokenizer.json files. A wrong rule gives other tokens
and worse answers without any error, so an unknown name is refused, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SINGLE_DIGITS = (r"\p{N}", *_GPT2)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class SplitRule:
    """Patterns applied in turn, each to what the ones before left; each match is a word.

    `whole_words`: a word that is a token is taken whole, without merges. `nfc`: text is brought
    to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3_RULE = SplitRule(_LLAMA3, whole_words=True)
_QWEN2_RULE = SplitRule(_QWEN2, nfc=True)

SPLIT_RULES = {
    "smollm": SplitRule(_SINGLE_DIGITS),
    "starcoder": SplitRule(_SINGLE_DIGITS),
    "refact": SplitRule(_SINGLE_DIGITS),
    "gpt-2": SplitRule(_GPT2),
    "default": SplitRule(_DEFAULT),
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "smaug-bpe": SplitRule(_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "tekken": SplitRule(_TEKKEN, whole_words=True),
    "deepseek-coder": SplitRule(_DEEPSEEK_CODER),
}
"""By the value of tokenizer.ggml.pre."""
