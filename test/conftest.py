"""What tests of several packages need."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

# As the launcher does for the worker; it counts only before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from phloem.srt.config import DEFAULT_MODEL
from phloem.srt.hub import resolve_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files go first, so that no process is left with one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file, from the local store; fetched once if it is not there."""
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives ports of the loopback interface that nobody listened on a moment ago."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find
