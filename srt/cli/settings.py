"""Options from a TOML file and from the environment, for the commands that take `--config`.

An option is named as its flag: `kv_tokens = 8192` in the file, `PHLOEM_KV_TOKENS=8192` in the
environment. What may be given several times is a list in the file, and has commas in the
environment. A name that is no option is an error, as is a value of the wrong type.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin

import msgspec
from cyclopts import App, ArgumentCollection, CycloptsError, Token

from phloem.srt.cli.options import flag, option_types
from phloem.srt.config import ServeConfig

DEFAULT_FILE = Path("phloem.toml")
PREFIX = "PHLOEM_"
OTHER_VARIABLES = frozenset({"PHLOEM_HOME", "PHLOEM_TRACE"})
"""Variables that are no options."""


class Settings:
    """A configuration source of the parser: gives each option that no flag set its value from the
    environment, else from the file, and says on stderr which came from where."""

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say or (lambda text: print(text, file=sys.stderr))

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        by_flag = {name: argument for argument in arguments for name in argument.names}
        if "--config" not in by_flag:
            return
        _refuse_two_models(by_flag)
        asked = by_flag["--config"].tokens
        path = Path(asked[0].value) if asked else DEFAULT_FILE
        sources = [("the environment", self._from_environment())]
        if asked or path.exists():
            sources.append((str(path), self._from_file(path)))
        for source, tokens in sources:
            taken = []
            for option, token in tokens.items():
                argument = by_flag.get(flag(option))
                if argument is not None and not argument.tokens:
                    argument.append(token)
                    taken.append(flag(option))
            if taken:
                self._say(f"phloem: {', '.join(taken)} from {source}")

    @staticmethod
    def _from_environment() -> dict[str, Token]:
        types = option_types()
        variables = {PREFIX + option.upper(): option for option in types}
        found = {}
        for variable, value in os.environ.items():
            if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
                continue
            if variable not in variables:
                raise _unknown("environment variable", variable, [*variables, *OTHER_VARIABLES])
            option = variables[variable]
            token = Token(keyword=variable, value=value, source="the environment")
            if get_origin(types[option]) is tuple:
                token = token.evolve(implicit_value=tuple(value.split(",")))
            found[option] = token
        return found

    @staticmethod
    def _from_file(path: Path) -> dict[str, Token]:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CycloptsError(msg=f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CycloptsError(msg=f"{path} is not TOML: {error}") from error
        types = option_types()
        found = {}
        for key, value in table.items():
            if isinstance(value, dict):
                raise CycloptsError(
                    msg=f"{path}: [{key}] is a table; options stand at the top, as in port = 30000"
                )
            if key not in types:
                raise _unknown(f"option in {path}:", key, types)
            found[key] = Token(
                keyword=key,
                value=str(value),
                implicit_value=_checked(path, key, value, types[key]),
                source=str(path),
            )
        return found


def set_options(config: ServeConfig) -> dict[str, object]:
    """The options that differ from their defaults, by name."""
    found = {}
    for group in fields(config):
        given = getattr(config, group.name)
        usual = type(given)()
        for option in fields(given):
            value = getattr(given, option.name)
            if value != getattr(usual, option.name):
                found[option.name] = value
    return found


def to_toml(options: dict[str, object]) -> str:
    """A file that `Settings` reads these options from (none may be None)."""
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items()
    )


def _checked(path: Path, key: str, value: object, kind: Any) -> object:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CycloptsError(msg=f"{path}: {key} = {value!r}: {error}") from error


def _refuse_two_models(by_flag: dict[str, Any]) -> None:
    positional, named = by_flag.get("MODEL"), by_flag.get("--model")
    if positional is not None and named is not None and positional.tokens and named.tokens:
        raise CycloptsError(msg="the model is given twice: as an argument and by --model")


def _unknown(what: str, name: str, known: Iterable[str]) -> CycloptsError:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    return CycloptsError(msg=f"unknown {what} {name}.{hint}")
