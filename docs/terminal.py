"""Draws `docs/terminal.svg`: real commands, run now, and what they print.

python docs/terminal.py http://127.0.0.1:30000     (a running `phloem serve`)
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "likes": {"enum": ["tea", "coffee", "neither"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def shown(command: list[str], display: str, console: Console) -> None:
    """Run `command`; show it as `display` and then its standard output."""
    console.print(Text.assemble(("$ ", "bold green"), (display, "bold")))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    console.print(Text(done.stdout.rstrip() or done.stderr.rstrip()))
    console.print()


def curl(url: str, body: dict[str, object], display: str, console: Console) -> None:
    header = "Content-Type: application/json"
    command = ["curl", "-s", url, "-H", header, "-d", json.dumps(body)]
    console.print(Text.assemble(("$ ", "bold green"), (display, "bold")))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reply = json.loads(done.stdout)
    console.print_json(json.dumps(reply.get("error") or reply["usage"]))
    console.print()


def main() -> None:
    url = sys.argv[1]
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder) / "person.json"
        schema.write_text(json.dumps(SCHEMA))
        shown(
            ["phloem", "run", "Invent a person. JSON.", "--json-schema", str(schema)],
            'phloem run "Invent a person. JSON." --json-schema person.json',
            console,
        )
    shown(
        ["phloem", "run", "Do cats like milk?", "--choice", "yes", "--choice", "no"],
        'phloem run "Do cats like milk?" --choice yes --choice no',
        console,
    )
    ask = {"prompt": "The sky is blue because", "max_tokens": 8}
    curl(f"{url}/v1/completions", ask, "curl …/v1/completions   # usage, first time", console)
    curl(f"{url}/v1/completions", ask, "curl …/v1/completions   # usage, again", console)
    refused = {"prompt": "x", "guided_json": {"type": "array", "uniqueItems": True}}
    curl(f"{url}/v1/completions", refused, "curl …   # a schema with uniqueItems", console)
    target = Path(__file__).with_name("terminal.svg")
    picture = console.export_svg(title="Phloem")
    # Without the fonts that rich would have it fetch; any monospaced one will do.
    target.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))
    print(target)


if __name__ == "__main__":
    main()
