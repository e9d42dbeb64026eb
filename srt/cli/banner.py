"""What `phloem serve` says once it answers: where, what, how, and a line to try."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import PurePath

from phloem.srt.cli.terminal import columns
from phloem.srt.generation import ModelCard
from phloem.srt.resolve import Resolved

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
_MESSAGES = [{"role": "user", "content": "Where is the Eiffel Tower? Answer in JSON."}]


def render_banner(
    url: str,
    card: ModelCard,
    resolved: Resolved,
    startup: dict[str, float],
    *,
    needs_key: bool = False,
) -> str:
    """The banner. `startup` is phase → seconds, with `total`.

    `needs_key`: the snippets take the API key from `PHLOEM_API_KEY`.
    """
    base, reasons = f"{_reachable(url)}/v1", resolved.reasons
    computes = f"cpu, {resolved.isa}" if resolved.backend == "cpu" else f"torch, {resolved.dtype}"
    rows = [
        ("model", f"{PurePath(card.path).name} ({card.architecture}, {card.format})"),
        ("context", f"{card.context_length:,} tokens"),
        (
            "KV cache",
            f"{card.kv_slots:,} tokens in {resolved.kv_dtype}{_because(reasons, 'kv_tokens')}",
        ),
        ("backend", f"{computes}{_because(reasons, 'backend')}"),
        ("threads", f"{resolved.threads}{_because(reasons, 'threads')}"),
        ("tool calls", _chat(card)),
        ("start-up", _startup(startup)),
    ]
    if resolved.config.cache.kv_tiers is not None:
        rows.insert(3, ("disk tier", reasons["kv_tiers"]))
    return "\n".join(
        [
            f"Phloem {version('phloem')} serves {card.name} at {url}",
            "",
            *("  " + line for line in columns(rows).splitlines()),
            "",
            "Try it:",
            "",
            _curl(base, card.name, needs_key),
            "",
            "or, with `pip install openai`:",
            "",
            _python(base, card.name, needs_key),
            "",
        ]
    )


def _reachable(url: str) -> str:
    """An address to connect to, where the server listens on all of them."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _because(reasons: dict[str, str], name: str) -> str:
    return f" ({reasons[name]})" if name in reasons else ""


def _chat(card: ModelCard) -> str:
    """What the chat template says of the model."""
    thinks = ", reasoning kept apart" if card.reasoning is not None else ""
    return f"{card.tool_format}{thinks}"


def _startup(startup: dict[str, float]) -> str:
    phases = {name: seconds for name, seconds in startup.items() if name != "total"}
    total = startup.get("total", sum(phases.values()))
    longest = sorted(phases.items(), key=lambda phase: -phase[1])[:4]
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest if seconds >= 0.05)
    return f"{total:.1f} s" + (f" ({told})" if told else "")


def _curl(base: str, model: str, needs_key: bool) -> str:
    body = {"model": model, "messages": _MESSAGES, "max_tokens": 64}
    key = '  -H "Authorization: Bearer $PHLOEM_API_KEY" \\\n  ' if needs_key else "  "
    return (
        f"  curl {base}/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  {key}-d '{json.dumps(body)}'"
    )


def _python(base: str, model: str, needs_key: bool) -> str:
    key = 'os.environ["PHLOEM_API_KEY"]' if needs_key else '"none"'
    lines = [
        *(["import os"] if needs_key else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{base}", api_key={key})',
        f"schema = {_literal(_SCHEMA)}",
        "reply = client.chat.completions.create(",
        f'    model="{model}",',
        f"    messages={_literal(_MESSAGES)},",
        '    response_format={"type": "json_schema",',
        '                     "json_schema": {"name": "place", "schema": schema}},',
        "    max_tokens=64,",
        ")",
        "print(reply.choices[0].message.content)",
    ]
    return "\n".join("  " + line for line in lines)


def _literal(value: object) -> str:
    return json.dumps(value).replace("false", "False")
