"""The commands with the real engine and the default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

PHLOEM = [sys.executable, "-m", "phloem.srt.cli"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def phloem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHLOEM, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_run_keeps_to_a_schema_and_says_nothing_else(default_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    done = phloem(
        "run", "Invent a person.", "--json-schema", str(path), "--model", str(default_model)
    )
    assert done.returncode == 0, done.stderr
    person = json.loads(done.stdout)
    assert isinstance(person["name"], str)
    assert isinstance(person["age"], int)


def test_run_cut_and_refused(default_model: Path) -> None:
    model = ["--model", str(default_model)]
    done = phloem("run", "Count to a hundred.", "--max-tokens", "4", *model)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip()
    done = phloem("run", "x", "--regex", "(", *model)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_an_answer_and_leaves_the_chat_alive(default_model: Path) -> None:
    """The pipe takes one page and the story is longer, so it waits for its reader: however fast the
    model is, it has not ended when Ctrl-C comes. One pipe for all keeps the order of what is said.
    """
    with subprocess.Popen(
        [*PHLOEM, "chat", str(default_model), "--max-tokens", "2000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,  # what is not asked for stays in the pipe
        pipesize=4096,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"Write a very long story about the sea.\n")
        while not (line := chat.stdout.readline()).endswith(b"/help tells the commands.\n"):
            assert line, "the chat did not start"
        begun = chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        rest, _ = chat.communicate(b"/clear\nSay hi.\n/exit\n", timeout=60)
    out = (begun + rest).decode()
    assert chat.returncode == 0, out
    story, interrupted, reply = out.partition("\n(interrupted)\nThe conversation is forgotten.\n")
    assert interrupted, out
    assert story
    assert reply.strip()


def test_lines_of_the_banner_work(default_model: Path) -> None:
    command = [*PHLOEM, "serve", str(default_model), "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        banner = ""
        while not banner.endswith("message.content)\n"):
            line = server.stdout.readline()
            assert line, banner
            banner += line
        curl = re.search(r"  (curl .*?)\n\n", banner, re.S)
        assert curl is not None
        answer = _run(["sh", "-c", curl[1]])
        assert json.loads(answer)["choices"][0]["message"]["content"]
        code = banner.partition("openai`:\n\n")[2]
        code = "\n".join(line.removeprefix("  ") for line in code.splitlines())
        assert _run([sys.executable, "-c", code]).startswith("{")
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


def _run(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return done.stdout
