"""The verbs of a program: `gen`, `select`, and the roles."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, TypeVar, Unpack, overload

from phloem.constrained.spec import Constraint, Ebnf, Regex
from phloem.lang import ir
from phloem.lang.choices import ChoicesMethod
from phloem.lang.errors import UsageError
from phloem.lang.options import (
    GEN_ORDER,
    GenOptions,
    LogprobOptions,
    Several,
    check_name,
    named,
    sampling_from,
)
from phloem.lang.reasoning import MARKS
from phloem.lang.sampling import check_regex
from phloem.lang.schema import SchemaLike, decoder, json_constraint

T = TypeVar("T")

_CONSTRAINTS: Final = ("dtype", "choices", "regex", "json_schema", "schema", "grammar")

# what `select` gives in any case
_MET_BY_CHOICES: Final = frozenset({"n", "logprobs", *LogprobOptions.__annotations__})

# The line end, or the space, that comes behind a number ends the answer, and is left out of it.
_DTYPES: Final[Mapping[type, tuple[str, tuple[str, ...]]]] = {
    int: (r"[-+]?[0-9]+[ \n]?", (" ", "\n")),
    float: (r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[ \n]?", (" ", "\n")),
    bool: (r"True|False", ()),
    str: (r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"', ()),
}


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    schema: type[T],
    **options: Unpack[GenOptions],
) -> ir.Gen[T]: ...
@overload
def gen(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    schema: type[T],
    **options: Unpack[GenOptions],
) -> ir.Gen[list[T]]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    schema: object,
    **options: Unpack[GenOptions],
) -> ir.Gen[Any]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    choices: Sequence[str],
    **options: Unpack[GenOptions],
) -> ir.Select: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    json_schema: SchemaLike | None = None,
    **options: Unpack[GenOptions],
) -> ir.Gen[str]: ...
@overload
def gen(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    json_schema: SchemaLike | None = None,
    **options: Unpack[GenOptions],
) -> ir.Gen[list[str]]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    json_schema: SchemaLike | None = None,
    **options: Unpack[GenOptions],
) -> ir.Gen[Any]: ...
def gen(name: str | None = None, *positional: Any, **options: Any) -> ir.Gen[Any] | ir.Select:
    """Let the model go on from here, and bind what it says to `name`.

    At most one of these says what the answer is like:

    - `schema`: a pydantic model, dataclass, TypedDict, msgspec Struct, `list[int]`, `Literal[…]` or
      any such type; or a JSON schema as a dict or text. The value is the object.
    - `json_schema`: the same; the value is the JSON text.
    - `regex`, which the whole answer matches; `grammar`, EBNF from whose `root` it is derived.
    - `dtype`: `int`, `float`, `bool` or `str`, as Python writes it; the value is the text.
    - `choices`, which makes this a `select`.

    Sampling options given here win over those of the run. `return_logprob` is short for
    `logprobs=0`. With `n` above 1 the value is a list, and nothing enters the text: append the
    answer you choose. Type checkers know that of an `n` that is written as a keyword, up to 16; of
    another one they know nothing. Positional arguments have the order of SGLang's `gen`
    (`phloem.lang.options.GEN_ORDER`).

    Raises `ValueError` or `TypeError` at once for what can be seen to be wrong; what only the
    server can judge becomes the variable's error.
    """
    check_name(name)
    given = named("gen", GEN_ORDER, positional, options)
    kinds = [kind for kind in _CONSTRAINTS if kind in given]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} exclude each other")
    if "choices" in given:
        return _choose(name, **given)
    if "choices_method" in given:
        raise TypeError("choices_method needs choices")
    if not kinds:
        return ir.Gen(name, sampling_from(given))
    kind = kinds[0]
    value = given.pop(kind)
    if kind == "dtype":
        return _of_dtype(name, value, given)
    decode = decoder(value) if kind == "schema" else None
    return ir.Gen(name, sampling_from(given), _constraint(kind, value), decode)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str = ChoicesMethod.TOKEN_LENGTH_NORMALIZED,
) -> ir.Select:
    """Let the model judge `choices` as continuations of the text so far; append the one it
    prefers and bind it to `name`. `choices_method` is one of `phloem.lang.choices.ChoicesMethod`.
    Nothing is drawn, so `temperature` can only be 0.

    Raises `TypeError` for choices that are not a list of texts, `ValueError` for none, an empty
    one, an unknown method or another temperature.
    """
    check_name(name)
    if isinstance(choices, str):
        raise TypeError("choices must be a list of texts, not one text")
    chosen = tuple(choices)
    if not all(isinstance(choice, str) for choice in chosen):
        raise TypeError("choices must be texts")
    if not chosen or "" in chosen:
        raise ValueError(f"choices must be non-empty texts, at least one: {chosen!r}")
    if temperature > 1e-5:  # SGLang takes as much for 0
        raise ValueError(f"choices are scored, not drawn: temperature={temperature} is not 0")
    return ir.Select(name, chosen, ChoicesMethod(choices_method))


def image(*source: object, **options: object) -> NoReturn:
    """Images are for models that see; none is supported yet. Raises `UsageError`."""
    raise UsageError("image(…): no model that takes images is supported yet")


def video(*source: object, **options: object) -> NoReturn:
    """As `image`."""
    raise UsageError("video(…): no model that takes videos is supported yet")


def system(expr: str | ir.Node = "") -> ir.Role:
    """A system message."""
    return ir.Role("system", ir.as_node(expr))


def user(expr: str | ir.Node = "") -> ir.Role:
    """A user message."""
    return ir.Role("user", ir.as_node(expr))


def assistant(expr: str | ir.Node = "") -> ir.Role:
    """An assistant message; the place for `gen` and `select`."""
    return ir.Role("assistant", ir.as_node(expr))


def system_begin() -> ir.RoleBegin:
    """A system message opens: what is appended from here on, up to `system_end()`, is in it."""
    return ir.RoleBegin("system")


def system_end() -> ir.RoleEnd:
    """The system message that is open closes."""
    return ir.RoleEnd("system")


def user_begin() -> ir.RoleBegin:
    """`system_begin` of a user message."""
    return ir.RoleBegin("user")


def user_end() -> ir.RoleEnd:
    """`system_end` of a user message."""
    return ir.RoleEnd("user")


def assistant_begin() -> ir.RoleBegin:
    """`system_begin` of an assistant message."""
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.RoleEnd:
    """`system_end` of an assistant message."""
    return ir.RoleEnd("assistant")


def separate_reasoning(expr: str | ir.Node, model_type: str) -> ir.Node:
    """`expr`, in which each named `gen` thinks first: its variable and the text are what it says
    then, and what it thought is the variable `NAME_reasoning_content`.

    A Phloem server tells the two apart itself. `model_type` (one of
    `phloem.lang.reasoning.MARKS`) says by which marks that is done where the server has not.

    Raises `ValueError` for another one.
    """
    marks = MARKS.get(model_type)
    if marks is None:
        raise ValueError(f"unknown model_type {model_type!r} (known: {', '.join(MARKS)})")
    return ir.with_marks(ir.as_node(expr), marks)


def _choose(
    name: str | None,
    *,
    choices: Sequence[str],
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str = ChoicesMethod.TOKEN_LENGTH_NORMALIZED,
    **rest: Any,
) -> ir.Select:
    if sampling_from(rest).samples > 1:
        raise TypeError(f"choices are scored, not drawn: n={rest['n']} has no meaning")
    idle = sorted(rest.keys() - _MET_BY_CHOICES)
    if idle:
        warnings.warn(
            f"choices are scored, not generated: {', '.join(idle)} has no effect",
            UserWarning,
            stacklevel=3,
        )
    return select(name, choices, temperature, choices_method)


def _of_dtype(name: str | None, dtype: object, given: dict[str, Any]) -> ir.Gen[str]:
    if not isinstance(dtype, type) or dtype not in _DTYPES:
        raise ValueError(f"dtype must be int, float, bool or str, not {dtype!r}")
    pattern, ends = _DTYPES[dtype]
    stop = given.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if ends:
        given["stop"] = (*stops, *ends)
    return ir.Gen(name, sampling_from(given), Regex(pattern=pattern))


def _constraint(kind: str, value: Any) -> Constraint:
    match kind:
        case "regex":
            check_regex(value, "regex")
            return Regex(pattern=value)
        case "grammar":
            return Ebnf(grammar=value)
        case _:
            return json_constraint(value, kind)
