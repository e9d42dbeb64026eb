"""The client's wheel: what is in it, and that programs run with nothing but its requirements."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import phloem

@phloem.function
def rate(s, review):
    s += phloem.user(review)
    forks = s.fork(2)
    forks += phloem.assistant("Stars: " + phloem.gen("stars", regex="[1-5]", max_tokens=1))
    forks.join()
    s += phloem.assistant(s["stars"][0] + phloem.select("sure", ["yes", "no"]))

items = [{"review": f"r{i}"} for i in range(5)]
for state in rate.run_batch(items, backend=URL, progress_bar=None):
    assert (state["stars"], state["sure"]) == (["4", "4"], "no"), state
stream = rate.stream(review="r", backend=phloem.OpenAIBackend(URL, dialect="phloem"))
"""

# Of what may be imported, the interpreter's own and what the client requires (and what that does).
BLOCKING = """
import sys
from importlib.machinery import PathFinder

ALLOWED = {*sys.stdlib_module_names, "phloem", "aiohttp", "msgspec", *(
    "aiohappyeyeballs aiosignal attr attrs frozenlist idna multidict propcache yarl "
    "typing_extensions"
).split()}
finders = list(sys.meta_path)

class Only:
    find_distributions = staticmethod(PathFinder.find_distributions)

    def find_spec(self, name, path=None, target=None):
        runtime = name.startswith(("phloem.srt", "phloem.radix"))
        if runtime or name.partition(".")[0] not in ALLOWED:
            return None
        found = (finder.find_spec(name, path, target) for finder in finders)
        return next((spec for spec in found if spec is not None), None)

sys.meta_path[:] = [Only()]
"""

# What a client machine is to be spared: checked where all of it is installed.
HEAVY = {
    *("torch", "numpy", "transformers", "tokenizers", "xgrammar", "llguidance", "gguf", "jinja2"),
    *("safetensors", "zmq", "psutil", "rich", "cyclopts", "prometheus_client", "jsonschema_rs"),
    *("phloem.srt", "phloem.radix", "phloem.constrained.base"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that gives four stars, and is not sure."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/score":
            values = [{"tokens": [c], "logprobs": [-1.0], "value": -1.0} for c in body["choices"]]
            self.answer({"index": 1, "choices": values})
        else:
            message = {"role": "assistant", "content": "4"}
            self.answer({"choices": [{"message": message, "finish_reason": "stop"}]})

    def answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "client/pyproject.toml").read_text(encoding="utf-8"))
    return project


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built from a copy of the sources that lie where they do here."""
    folder = tmp_path_factory.mktemp("client")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("client", "lang", "constrained"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", folder)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--quiet", "--disable-pip-version-check", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(folder / "client")], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def loaded_by(script: str, path: Path | None = None) -> dict[str, str]:
    """Modules that a fresh interpreter has loaded after `script`, and the files they are from."""
    listing = "import sys\nfor n, m in sys.modules.items(): print(n, getattr(m, '__file__', None))"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\n{listing}"],
        capture_output=True,
        text=True,
        cwd="/",
        env=None if path is None else {"PYTHONPATH": str(path)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_programs_run_with_the_wheel_and_its_requirements_only(wheel: Path, url: str) -> None:
    modules = loaded_by(f"{BLOCKING}\nURL = {url!r}\n{PROGRAM}", wheel)
    ours = {name: file for name, file in modules.items() if name.partition(".")[0] == "phloem"}
    assert len(ours) > 20
    for name, file in ours.items():
        assert file.startswith(str(wheel)), name


def test_what_needs_the_runtime_says_so(wheel: Path) -> None:
    engine = "try: phloem.Engine\nexcept ImportError as exc: assert 'install phloem' in str(exc)"
    ending = "else: raise AssertionError\nassert phloem.__version__"
    script = f"{BLOCKING}\nimport phloem\n{engine}\n{ending}"
    loaded_by(script, wheel)


@pytest.mark.parametrize("lines", [PROGRAM.count("\n"), 2])
def test_running_programs_loads_nothing_heavy(url: str, lines: int) -> None:
    head = "\n".join(PROGRAM.splitlines()[:lines])
    assert not loaded_by(f"URL = {url!r}\n{head}").keys() & HEAVY


def test_wheel_and_project_agree(wheel: Path, table: dict[str, Any]) -> None:
    server = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    client = table["project"]
    assert client["version"] == server["version"]
    assert set(client["dependencies"]) <= set(server["dependencies"])
    packages = {"phloem"}
    for init in (ROOT / "lang").rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts[:2] != ("lang", "_phloem"):
            packages.add(".".join(("phloem", *parts)))
    assert set(table["tool"]["setuptools"]["packages"]) == packages
    files = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*.py")}
    assert {"phloem/__init__.py", "phloem/lang/api.py", "phloem/constrained/spec.py"} <= files
    assert not any(name.startswith(("phloem/srt", "phloem/radix")) for name in files)
    (about,) = wheel.glob("*.dist-info")
    assert (about / "licenses/LICENSE").is_file()
