"""What is settled before a server starts: its certificate, and how many files may be open."""

from __future__ import annotations

import resource
import ssl
import subprocess
from pathlib import Path

import pytest

from phloem.srt import launch
from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two self-signed certificates, their keys, and one key under a password."""
    folder = tmp_path_factory.mktemp("pem")
    for name in ("one", "two"):
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-subj", "/CN=localhost", "-days", "1"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"),
        )
    locked = ("-aes256", "-passout", "pass:secret", "-out", folder / "locked.key")
    openssl("ec", "-in", folder / "one.key", *locked)
    both = (folder / "one.crt").read_bytes() + (folder / "one.key").read_bytes()
    (folder / "both.pem").write_bytes(both)
    (folder / "words.pem").write_text("no certificate")
    return folder


def context(folder: Path, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    paths = [None if name is None else str(folder / name) for name in (cert, key)]
    return launch._tls_context(ServerOptions(tls_cert=paths[0], tls_key=paths[1]))


@pytest.mark.parametrize(("cert", "key"), [("one.crt", "one.key"), ("both.pem", None)])
def test_a_certificate_with_its_key_is_taken(pem: Path, cert: str, key: str | None) -> None:
    tls = context(pem, cert, key)
    assert tls is not None
    assert tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert tls.verify_mode is ssl.CERT_NONE  # clients need none


def test_without_a_certificate_it_is_plain_http(pem: Path) -> None:
    assert context(pem, None, None) is None


@pytest.mark.parametrize(
    ("cert", "key", "param", "told"),
    [
        (None, "one.key", "tls_cert", "needs tls_cert"),
        ("none.crt", "one.key", "tls_cert", "cannot read"),
        ("one.crt", "none.key", "tls_key", "cannot read"),
        ("one.crt", None, "tls_cert", "no certificate and its key"),
        ("one.crt", "two.key", "tls_cert", "no certificate and its key"),
        ("words.pem", None, "tls_cert", "no certificate and its key"),
        ("one.crt", "locked.key", "tls_key", "encrypted"),
    ],
)
def test_what_cannot_be_served_with_is_named(
    pem: Path, cert: str | None, key: str | None, param: str, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        context(pem, cert, key)
    assert caught.value.param == f"server.{param}"


@pytest.mark.parametrize(
    ("soft", "hard", "after", "warns"),
    [
        (256, 4096, 100 + launch.OTHER_FILES, False),
        (256, 300, 300, True),
        (1024, 4096, 1024, False),
        (256, resource.RLIM_INFINITY, 100 + launch.OTHER_FILES, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, False),
    ],
)
def test_as_many_files_as_connections(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    after: int,
    warns: bool,
) -> None:
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: now.__setitem__(0, limits))
    launch._allow_files(100)
    assert now[0] == (after, hard)
    assert bool(caplog.records) is warns
