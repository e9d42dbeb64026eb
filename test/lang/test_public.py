"""What `import phloem` offers, and what it must not load."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import phloem


def test_all_is_what_is_visible_and_all_of_it_exists() -> None:
    assert dir(phloem) == sorted(phloem.__all__)
    for name in phloem.__all__:
        if name not in ("Engine", "BlockingEngine", "Runtime"):  # these load the runtime
            assert getattr(phloem, name) is not None
    public = {
        name
        for name, value in vars(phloem).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    public -= {"annotations", "TYPE_CHECKING", "Any"}
    assert public <= set(phloem.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        phloem.generate  # noqa: B018


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_dsl_loads_neither_torch_nor_the_runtime() -> None:
    modules = loaded_by(
        "import phloem; phloem.function; phloem.gen; phloem.MockBackend; phloem.GenerationError"
    )
    for heavy in ("torch", "numpy", "zmq", "rich", "aiohttp", "transformers", "phloem.srt"):
        assert heavy not in modules
    assert "phloem.srt" not in loaded_by("import phloem; phloem.HttpBackend; phloem.connect")


def test_the_root_loads_nothing() -> None:
    modules = loaded_by("import phloem.radix")
    assert not any(name.startswith("phloem.lang") for name in modules)
    assert "asyncio" not in modules
