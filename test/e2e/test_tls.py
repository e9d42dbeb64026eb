"""HTTPS, really: a certificate made for the test, and clients that check it."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

pytestmark = [pytest.mark.e2e, pytest.mark.model]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=phloem test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(scope="module")
def secure(start_server: Callable[..., Any], certificate: tuple[Path, Path]) -> Any:
    cert, key = map(str, certificate)
    server = start_server(
        *("--kv-tokens", "4096", "--tls-cert", cert, "--tls-key", key), ready=False
    )
    server.url = server.url.replace("http://", "https://")
    trusting = ssl.create_default_context(cafile=cert)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusting))

    def ready() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        try:
            return bool(opener.open(f"{server.url}/ready", timeout=10).status == 200)
        except urllib.error.HTTPError:
            return False
        except OSError:
            return False

    server.until(ready, 90)
    server.opener = opener
    return server


def test_a_client_that_knows_the_certificate_is_served(
    secure: Any, certificate: tuple[Path, Path]
) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        httpx.Client(verify=trusting) as http,
        OpenAI(base_url=f"{secure.url}/v1", api_key="none", http_client=http) as client,
    ):
        whole = client.completions.create(model="tiny", prompt="The sky is", max_tokens=8, seed=1)
        stream = client.completions.create(
            model="tiny", prompt="The sky is", max_tokens=8, seed=1, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        assert text == whole.choices[0].text


def test_a_client_that_does_not_know_it_turns_away(secure: Any) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{secure.url}/health", timeout=10)


def test_plain_http_gets_nothing_and_the_server_goes_on(secure: Any) -> None:
    with pytest.raises(OSError):  # noqa: PT011 — reset or closed, as the kernel has it
        urllib.request.urlopen(secure.url.replace("https", "http") + "/health", timeout=10)
    with secure.opener.open(f"{secure.url}/health", timeout=10) as reply:
        assert json.loads(reply.read())["status"] == "ok"


def test_the_banner_says_https(secure: Any) -> None:
    assert f"https://127.0.0.1:{secure.port}" in secure.log.read_text()
