"""The options of calls by the names, and in the order, of SGLang's functions, beside our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import DrawingOptions, Sampling, SamplingOverrides, sampling_of

Several = Literal[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
"""Numbers of answers by which type checkers know that a value is a list."""


class LogprobOptions(TypedDict, total=False):
    """SGLang's way to ask for logprobs, which ours (`logprobs=`) is short for."""

    return_logprob: bool | None
    """True is `logprobs=0`."""
    logprob_start_len: int | None
    """Only -1: logprobs are of answers, not of prompts."""
    top_logprobs_num: int | None
    """As `logprobs`."""
    return_text_in_logprobs: bool | None
    """Has no effect: the tokens' texts are always there."""


class RunOptions(SamplingOverrides, LogprobOptions, total=False):
    """The options of a run: defaults of all its calls."""

    max_new_tokens: int | None
    """SGLang's name of `max_tokens`."""


class AnswerOptions(DrawingOptions, LogprobOptions, total=False):
    """The options of all calls that have no effect on the type of the value."""


class GenOptions(AnswerOptions, total=False):
    """Those of `gen`."""

    dtype: type | None
    """`int`, `float`, `bool` or `str`: the answer is such a value as Python writes it."""
    choices_method: ChoicesMethod | str | None
    """How `choices` are judged; a `ChoicesMethod` or its name."""
    regex: str | None
    """A pattern that the whole answer matches."""
    grammar: str | None
    """EBNF; the answer is derived from its `root`."""


_TO_THE_LOGPROBS = (
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)

GEN_ORDER = (
    "max_tokens",
    "min_tokens",
    "n",
    *_TO_THE_LOGPROBS,
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
)
"""What positional arguments of `gen` mean, after `name`."""

SCALAR_ORDER = ("max_tokens", "n", *_TO_THE_LOGPROBS)
"""The same of `gen_int`, `gen_float`, `gen_bool` and `gen_string`."""

RUN_FIELDS = frozenset(RunOptions.__annotations__)


def check_name(name: object) -> None:
    """Raise `TypeError` for what is no name of a variable, nor None."""
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"a variable's name must be a non-empty text, not {name!r}")


def named(
    function: str, order: Sequence[str], positional: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All options by name; those that are None say nothing and are left out. Raises `TypeError` as
    a call with too many arguments, or one given twice, does."""
    if len(positional) > len(order):
        most = len(order) + 1
        raise TypeError(
            f"{function}() takes up to {most} positional arguments, not {len(positional) + 1}"
        )
    given = dict(zip(order, positional, strict=False))
    for name in given.keys() & options.keys():
        raise TypeError(f"{function}() got two values for {name!r}")
    return {name: value for name, value in {**given, **options}.items() if value is not None}


def run_sampling(options: Mapping[str, Any]) -> Sampling:
    """`RunOptions` → `Sampling`. Raises what `sampling_from` raises."""
    fields = dict(options)
    most = fields.pop("max_new_tokens", None)
    if most is not None:
        if fields.get("max_tokens") is not None:
            raise TypeError("max_new_tokens and max_tokens are the same option: give one of them")
        fields["max_tokens"] = most
    return sampling_from(fields)


def sampling_from(options: Mapping[str, Any]) -> Sampling:
    """Options of a call without its constraint → `Sampling`.

    Raises what `sampling_of` raises, and `ValueError` for logprobs of the prompt.
    """
    fields = dict(options)
    start = fields.pop("logprob_start_len", None)
    if start is not None and start != -1:
        raise ValueError(
            f"logprob_start_len={start}: programs get logprobs of answers, not of prompts; "
            "select scores texts"
        )
    fields.pop("return_text_in_logprobs", None)  # the text is always there
    top = fields.pop("top_logprobs_num", None)
    if fields.pop("return_logprob", None) or top:
        fields.setdefault("logprobs", top or 0)
    return sampling_of(fields)
