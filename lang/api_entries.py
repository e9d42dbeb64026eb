"""A public name as Markdown: its signature, its docstring, the table of its options."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, Final, get_overloads, is_typeddict

from phloem.lang.backend.base import Backend
from phloem.lang.backend.selecting import Selecting
from phloem.lang.hints import EndsPrograms

# the methods that Python's own syntax calls, as it is written
_OPERATORS: Final = {
    "__call__": "{}(…)",
    "__iadd__": "{} += value",
    "__getitem__": "{}[key]",
    "__setitem__": "{}[key] = value",
    "__contains__": "name in {}",
}
_PROTOCOLS: Final = (Backend, Selecting, EndsPrograms)
_ASKED: Final = frozenset(name for protocol in _PROTOCOLS for name in vars(protocol))
_WIDE: Final = 92  # of a signature in one line
_RAISES: Final = re.compile(r"(?:(?<=\s)|^)Raises (?:`[^`]*`|\.(?=\S)|[^.`])+\.", re.MULTILINE)
_MODULE: Final = re.compile(r"\b[a-z_]\w*\.(?=[A-Z])")


def markdown(name: str, value: Any, *, constructed: bool, entries: frozenset[str]) -> str:
    """What the page says of a function, class, table of options or method.

    `constructed` says that a class is called by users, so that its parameters are of interest;
    `entries` are the names, also of members as `Class.name`, that have an entry of their own.
    Raises `LookupError` if something that is to be on the page has no docstring.
    """
    if not doc_of(value):
        raise LookupError(f"{name} has no docstring")
    if is_typeddict(value):
        return _options(value)
    parts = []
    if not inspect.isclass(value) or constructed:
        parts.append("```python\n" + "\n".join(_signatures(name, value)) + "\n```")
    parts.append(prose(doc_of(value)))
    members = [item(shown, doc) for shown, doc in _members(value, entries)]
    return "\n\n".join([*parts, *(["\n".join(members)] if members else [])])


def item(shown: str, doc: str) -> str:
    """Something that is written as `shown`, as an item of a list. Raises `LookupError` if it has
    no docstring."""
    if not doc:
        raise LookupError(f"{shown} has no docstring")
    text = prose(doc)
    flat = "\n- " not in text and "\n    " not in text
    return f"- `{shown}`: " + (text.replace("\n\n", " ") if flat else text.replace("\n", "\n  "))


def signature(name: str, value: Callable[..., Any]) -> str:
    """How `value` is called, in one line."""
    return " ".join(_signature(name, value).split()).replace("( ", "(").replace(", )", ")")


def doc_of(value: Any) -> str:
    """The docstring that is written there, not one that is inherited; empty if there is none."""
    written = value.fget.__doc__ if isinstance(value, property) else value.__doc__
    generated = inspect.isclass(value) and (written or "").startswith(f"{value.__name__}(")
    return "" if generated else inspect.cleandoc(written or "")


def prose(doc: str) -> str:
    """A docstring as Markdown: paragraphs in one line each, what is raised at the end."""
    kept, raised = [], []
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith(("    ", "- ")):
            kept.append(paragraph)
            continue
        text = " ".join(paragraph.split())
        raised += _RAISES.findall(text)
        text = " ".join(_RAISES.sub("", text).split())
        if text:
            kept.append(text)
    if raised:
        kept.append(" ".join(raised).replace("Raises", "**Raises**", 1))
    return "\n\n".join(kept)


def public_members(cls: type, entries: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class as they are written, and the documented ones
    that an operator calls; those of its bases included that are not in `entries` themselves."""
    seen = set()
    for base in cls.__mro__:
        ours = base.__module__.startswith("phloem.") and base.__name__ not in entries
        if base is not cls and not ours:
            continue
        for name, value in vars(base).items():
            member = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if name in seen or not isinstance(member, FunctionType | property):
                continue
            if not name.startswith("_") or (name in _OPERATORS and doc_of(member)):
                seen.add(name)
                yield name, member


def written_below(module: ModuleType) -> dict[str, tuple[str, str]]:
    """The names of a module, or of a class of it as `Class.field`, that have a docstring below
    them: what they are, and the docstring."""
    found: dict[str, tuple[str, str]] = {}
    _collect(ast.parse(inspect.getsource(module)).body, "", found)
    return found


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, tuple[str, str]]) -> None:
    for statement, below in zip(body, [*body[1:], None], strict=True):
        match statement, below:
            case ast.ClassDef() as cls, _:
                _collect(cls.body, f"{cls.name}.", found)
            case ast.If() as block, _:
                _collect(block.body, prefix, found)
            case (
                (
                    ast.AnnAssign(
                        target=ast.Name(id=name), annotation=ast.Name(id="Final"), value=what
                    )
                    | ast.AnnAssign(target=ast.Name(id=name), annotation=what)
                    | ast.Assign(targets=[ast.Name(id=name)], value=what)
                ),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ) if what is not None:
                source = _MODULE.sub("", ast.unparse(what)).replace("'", '"')
                found[prefix + name] = (source, inspect.cleandoc(doc))


def _options(cls: type) -> str:
    """A TypedDict as a table of its own keys."""
    module = sys.modules[cls.__module__]
    described = written_below(module)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    bases = [ast.unparse(base) for base in tree.bases if ast.unparse(base) != "TypedDict"]
    rows = ["| Option | Type | |", "|---|---|---|"]
    for field in tree.body:
        if isinstance(field, ast.AnnAssign):
            name = ast.unparse(field.target)
            kind, doc = described.get(f"{cls.__name__}.{name}", ("", ""))
            if not doc:
                raise LookupError(f"{cls.__name__}.{name} has no docstring")
            kind = kind.removesuffix(" | None").replace("|", "\\|")
            rows.append(f"| `{name}` | `{kind}` | {' '.join(doc.split())} |")
    besides = [f"Besides these, those of {' and '.join(f'`{base}`' for base in bases)}."]
    table = ["\n".join(rows)] if len(rows) > 2 else []
    return "\n\n".join([prose(doc_of(cls)), *table, *(besides if bases else [])])


def _members(value: Any, entries: frozenset[str]) -> Iterator[tuple[str, str]]:
    """How each member of a class is written, and its docstring; none where it is as its base says,
    or, of a backend, as the protocol does."""
    if not inspect.isclass(value):
        return
    for name, member in public_members(value, entries):
        doc = doc_of(member)
        if f"{value.__name__}.{name}" in entries or (name in _ASKED and value not in _PROTOCOLS):
            continue
        if not doc:
            if not any(name in vars(base) for base in value.__mro__[1:]):
                raise LookupError(f"{value.__name__}.{name} has no docstring")
            continue
        if name in _OPERATORS:
            yield _OPERATORS[name].format(value.__name__.lower()), doc
        elif isinstance(member, property):
            kind = _MODULE.sub("", str(member.fget.__annotations__["return"]))
            yield f"{name}: {kind}", doc
        else:
            yield signature(name, member), doc


def _signatures(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [_signature(name, value)]
    return [_signature(name, one) for one in get_overloads(value) or [value]]


def _signature(name: str, value: Callable[..., Any]) -> str:
    """A call as it is written, in one line or in one a parameter. A block's is a `with`."""
    said = inspect.signature(value)
    parts: list[str] = []
    for parameter in said.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in parts):
            parts.append("*")
        parts.append(_parameter(parameter))
    result = "" if said.return_annotation is said.empty else _type(said.return_annotation)
    opening = "async " if inspect.iscoroutinefunction(value) else ""
    if result == "Iterator[None]" and hasattr(value, "__wrapped__"):
        opening, result = "with ", ""
    result = f" -> {result}" if result and not inspect.isclass(value) else ""
    line = f"{opening}{name}({', '.join(parts)}){result}"
    if len(line) <= _WIDE:
        return line
    rows = "".join(f"    {part},\n" for part in parts)
    return f"{opening}{name}(\n{rows}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
    kind = "" if parameter.annotation is parameter.empty else _type(parameter.annotation)
    shown = f"{stars}{parameter.name}"
    if kind and not (stars and kind == "Any"):
        shown += f": {kind}"
    if parameter.default is parameter.empty:
        return shown
    equals = " = " if ":" in shown else "="
    return shown + equals + _default(parameter.default)


def _default(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return f'"{value}"'
    with contextlib.suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    return "…"


def _type(annotation: object) -> str:
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"Unpack\[(\w+)\]", r"\1", _MODULE.sub("", shown)).replace("'", '"')
