"""The worker is numpy; torch comes only with the model that computes by it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "phloem.srt.models.base",
        "phloem.srt.models.loading",
        "phloem.srt.worker.inputs",
        "phloem.srt.worker.process",
        "phloem.srt.worker.runner",
        "phloem.srt.worker.sampler",
    ],
)
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
