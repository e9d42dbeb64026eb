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
    with subprocess.Popen(
        [*PHLOEM, "chat", str(default_model), "--max-tokens", "2000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("Write a very long story about the sea.\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        out, err = chat.communicate("Say hi.\n/exit\n", timeout=60)
    assert chat.returncode == 0, err
    assert "(interrupted)" in err
    assert len(out.strip().splitlines()) >= 2


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
