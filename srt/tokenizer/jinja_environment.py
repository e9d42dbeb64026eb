"""The Jinja environment that chat templates of published models are written for.

Sandboxed: a template comes with the model file, so it may be wrong or hostile, and must reach
neither Python's internals nor anything outside its arguments.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template itself refused the conversation (`raise_exception`)."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Block trimming, loop controls, and the filters and functions templates count on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
