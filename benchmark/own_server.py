"""A Phloem server of one's own, with flags as on the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from peers import Running, Setting, running

from phloem.srt.config import DEFAULT_MODEL
from phloem.srt.hub import resolve_model


@contextmanager
def own_server(
    *flags: str, model: Path | None = None, log: Path | None = None
) -> Iterator[Running]:
    """Start a server of `model` (None: the default one) with `flags`, and end it afterwards. Its
    output goes to `log`. Raises `PeerFailed` if it does not come up."""
    setting = Setting(
        model=model or resolve_model(DEFAULT_MODEL).path,
        model_folder=None,
        threads=psutil.cpu_count(logical=False) or 1,
        dtype="float32",
    )
    with tempfile.TemporaryDirectory(prefix="phloem-bench-") as folder:
        output = log or Path(folder) / "server.log"
        with running("phloem", setting, output, flags) as server:
            yield server


def processes(server: Running) -> dict[str, psutil.Process]:
    """The server's processes by role; `frontend` is the one that was started."""
    root = psutil.Process(server.pid)
    found = {"frontend": root}
    for child in root.children():
        try:
            arguments = child.cmdline()
        except psutil.Error:
            continue  # it is just ending
        if "phloem.srt.process" in arguments:
            found[arguments[-1]] = child
    return found


def metric(text: str, name: str) -> float:
    """The value of a metric without labels in the text of `/metrics`. Raises `KeyError`."""
    for line in text.splitlines():
        key, _, value = line.rpartition(" ")
        if key.split("{")[0] == name:
            return float(value)
    raise KeyError(name)


def words_for(tokens: int) -> int:
    """Words of `TextSource` that are about so many tokens of common tokenizers."""
    return max(1, tokens * 10 // 11)
