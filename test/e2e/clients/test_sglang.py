"""SGLang's own frontend, two versions of it, and the checks of its server that it ships."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

RUNNER = Path(__file__).with_name("sglang_runner.py")
INSTALLED = Path(sys.prefix) / "sglang"
"""Where `make install` puts the packages, without their dependencies."""

EXACT = ["mt_bench", "select", "decode_json_regex", "expert_answer"]
EXACT += ["parallel_decoding", "parallel_encoding", "stream", "regex", "dtype_gen"]
CLEVER = ["few_shot_qa", "decode_int", "decode_json", "tool_use", "react"]
"""These also judge what the model says, which a small one gets wrong, or does not finish in the
64 tokens that they give it."""

KITS = ["ebnf_constrained_kit", "json_constrained_kit", "matched_stop_kit", "regex_constrained_kit"]


async def run(kind: str, version: str, *arguments: str) -> dict[str, str]:
    folder = INSTALLED / version
    assert folder.is_dir(), f"{folder} is not there: run `make install`"
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", str(RUNNER), kind, str(folder), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            said, told = await child.communicate()
    except TimeoutError:
        child.kill()
        _, told = await child.communicate()
        raise AssertionError(f"it hangs:\n{told.decode()[-2000:]}") from None
    assert child.returncode == 0, told.decode()[-2000:]
    found: dict[str, str] = json.loads(said)
    return found


@pytest.mark.parametrize("version", ["0.5.2", "0.5.10"])
@pytest.mark.client("sglang", "the programs of its own tests (0.5.2), over `RuntimeEndpoint`")
async def test_programs(server: Any, version: str) -> None:
    found = await run("programs", version, server.url, *EXACT, *CLEVER)
    assert {name: told for name, told in found.items() if name in EXACT} == dict.fromkeys(
        EXACT, "ok"
    )
    for name in CLEVER:
        assert found[name] == "ok" or found[name].startswith(("AssertionError", "JSONDecodeError"))


@pytest.mark.client("sglang", "its kits of HTTP checks (0.5.10): EBNF, JSON, regex, stops")
async def test_kits(server: Any) -> None:
    found = await run("kits", "0.5.10", server.url, "tiny", *KITS)
    assert len(found) >= 24
    failed = {name: told for name, told in found.items() if told != "ok"}
    # It wants more of the model than its grammar does: all three members.
    failed.pop("test_ebnf_generate_complex_json", None)
    assert failed == {}


@pytest.mark.client("sglang", "abort_all of 32 requests (0.5.10)")
async def test_abort_all(start_server: Any) -> None:
    server = start_server("--kv-tokens", "16384")
    found = await run("kits", "0.5.10", server.url, "tiny", "abort_timeout_kit.AbortAllMixin")
    assert found == {"test_abort_all": "ok"}
