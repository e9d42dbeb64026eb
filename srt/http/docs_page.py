"""`/docs`: the page that shows `/openapi.json`.

Its routes and their examples are written here, so that it is readable without a script and without
a key; the script adds the fields, from the document.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any, Final

Node = dict[str, Any]

_KEY: Final = '-H "Authorization: Bearer $KEY"'
_ORIGIN: Final = '<span class="origin">localhost:30000</span>'
"""Where the documentation's server listens; the script puts the page's own origin there."""
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


def page(document: Node, *, keys: bool) -> str:
    """The page of an OpenAPI document; `keys` says whether its server asks for them."""
    sections = "".join(
        f"<section>\n<h2>{escape(tag['name'])}</h2>\n{_operations(document, tag['name'], keys)}"
        "</section>\n"
        for tag in document["tags"]
    )
    filled = _template().replace("<!--routes-->", sections)
    return filled.replace('<body data-keys="">', f'<body data-keys="{"yes" if keys else ""}">')


@cache
def policy() -> str:
    """The policy under which a browser runs the page's script and no other."""
    script = _template().partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; connect-src 'self'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _template() -> str:
    return files("phloem.srt.http").joinpath("docs.html").read_text(encoding="utf-8")


def _operations(document: Node, tag: str, keys: bool) -> str:
    return "".join(
        _operation(method, path, operation, keys)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if tag in operation["tags"]
    )


def _operation(method: str, path: str, operation: Node, keys: bool) -> str:
    said = "".join(f"<p>{_prose(one)}</p>\n" for one in operation["description"].split("\n\n"))
    return (
        f'<details class="operation" id="{operation["operationId"]}">\n'
        f'<summary><span class="method">{method.upper()}</span> '
        f'<span class="path">{escape(path)}</span> '
        f'<span class="what">{escape(operation["summary"])}</span></summary>\n'
        f"<div>\n{said}<pre>{_command(method, path, operation, keys)}</pre>\n</div>\n"
        "</details>\n"
    )


def _prose(text: str) -> str:
    """`text`, in which names stand in backquotes."""
    parts = escape(text).split("`")
    return "".join(f"<code>{one}</code>" if i % 2 else one for i, one in enumerate(parts))


def _command(method: str, path: str, operation: Node, keys: bool) -> str:
    """The example as a command for a shell, in HTML. What stands in the path is a variable."""
    contents: dict[str, Node] = operation.get("requestBody", {}).get("content", {})
    media_type = next(iter(contents), "")
    example = contents[media_type].get("example") if contents else None
    words = ["curl"]
    if method != ("post" if example else "get"):
        words.append(f"-X {method.upper()}")
    if keys and operation["security"]:
        words.append(_KEY)
    if example and media_type == "application/json":
        words.append(f"--json {shlex.quote(json.dumps(example, ensure_ascii=False))}")
    elif example:
        words += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in example.items()]
    url = escape(_PARAMETER.sub(lambda match: f"${match[1].upper()}", path))
    quote = escape('"') if "$" in url else ""
    return f"{escape(' '.join(words))} {quote}{_ORIGIN}{url}{quote}"
