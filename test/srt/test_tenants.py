"""The file of tenants, and what keeps one tenant from another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.srt.errors import InvalidRequest
from phloem.srt.tenants import OPERATOR, Scope, Tenant, load_tenants, scoped, unscoped


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    return path


def test_every_field(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        [tenants.acme]
        key_sha256 = ["{sha("a")}", "{sha("b").upper()}"]
        weight = 2
        priority = -3
        kv_quota = 5000
        share = true
        scopes = ["inference", "admin"]

        [tenants."b.c-d_e"]
        key_sha256 = "{sha("c")}"
        """,
    )
    assert load_tenants(path) == {
        "acme": Tenant(
            name="acme",
            key_sha256=(sha("a"), sha("b")),
            weight=2.0,
            priority=-3,
            kv_quota=5000,
            share=True,
            scopes=frozenset({Scope.INFERENCE, Scope.ADMIN}),
        ),
        "b.c-d_e": Tenant(name="b.c-d_e", key_sha256=(sha("c"),)),
    }


KEY = f'key_sha256 = "{sha("k")}"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenants = [", "is not TOML"),
        ("", "there is no tenant"),
        ("[tenants]", "there is no tenant"),
        ("tenants = 3", "there is no tenant"),
        (f"[tenant.a]\n{KEY}", "tenant is unknown"),
        (f"[tenants.a]\n{KEY}[limits]\n", "limits is unknown"),
        ("[tenants]\na = 1", "[tenants.a] is not a table"),
        (f'[tenants."a b"]\n{KEY}', "'a b' is no name"),
        (f'[tenants.""]\n{KEY}', "'' is no name"),
        (f'[tenants."a/b"]\n{KEY}', "'a/b' is no name"),
        (f'[tenants."{"a" * 65}"]\n{KEY}', "is no name"),
        ("[tenants.a]\nweight = 1", "[tenants.a] Object missing required field `key_sha256`"),
        (f"[tenants.a]\n{KEY}wieght = 1", "[tenants.a] Object contains unknown field `wieght`"),
        (f"[tenants.a]\n{KEY}weight = 0", "[tenants.a] weight: "),
        (f"[tenants.a]\n{KEY}weight = nan", "[tenants.a] weight: "),
        (f"[tenants.a]\n{KEY}weight = inf", "[tenants.a] weight: "),
        (f'[tenants.a]\n{KEY}weight = "2"', "[tenants.a] weight: "),
        (f"[tenants.a]\n{KEY}priority = 1.5", "[tenants.a] priority: "),
        (f"[tenants.a]\n{KEY}priority = 3_000_000_000", "[tenants.a] priority: "),
        (f"[tenants.a]\n{KEY}kv_quota = 0", "[tenants.a] kv_quota: "),
        (f"[tenants.a]\n{KEY}kv_quota = true", "[tenants.a] kv_quota: "),
        (f"[tenants.a]\n{KEY}share = 1", "[tenants.a] share: "),
        (f'[tenants.a]\n{KEY}scopes = ["root"]', "[tenants.a] scopes[0]: "),
        (f"[tenants.a]\n{KEY}scopes = []", "[tenants.a] scopes: "),
        ('[tenants.a]\nkey_sha256 = "abc"', "[tenants.a] key_sha256: "),
        (f'[tenants.a]\nkey_sha256 = "{"g" * 64}"', "[tenants.a] key_sha256: "),
        ("[tenants.a]\nkey_sha256 = []", "[tenants.a] key_sha256: there is no key"),
        (f'[tenants.a]\nkey_sha256 = "{sha("")}"', "the SHA-256 of nothing"),
        (f"[tenants.a]\n{KEY}[tenants.b]\n{KEY}", "[tenants.b] key_sha256: [tenants.a] has the"),
    ],
)
def test_errors_name_file_table_and_field(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidRequest) as refusal:
        load_tenants(path)
    assert str(path) in refusal.value.message
    assert told in refusal.value.message, refusal.value.message
    assert refusal.value.param == "server.tenants"
    assert sha("k") not in refusal.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "binary"):
        with pytest.raises(InvalidRequest, match=str(path)):
            load_tenants(path)


# Pieces of which namespaces are built, so that a careless joining would confuse them.
salts = st.lists(st.text(alphabet="a1:/@ \x1f", max_size=4), max_size=3)
names = st.text(alphabet="a1.-_", min_size=1, max_size=3)


def space(name: str, given_salts: list[str], *, share: bool) -> str:
    return Tenant(name=name, share=share).namespace(*given_salts)


@given(names, salts, st.booleans(), names, salts, st.booleans())
def test_namespaces_meet_only_where_they_should(
    name: str, own: list[str], share: bool, other: str, others: list[str], others_share: bool
) -> None:
    same_salts = [salt for salt in own if salt] == [salt for salt in others if salt]
    same_space = share == others_share and (share or name == other)
    meet = space(name, own, share=share) == space(other, others, share=others_share)
    assert meet == (same_salts and same_space)


@given(names, salts, st.booleans(), names, st.booleans())
def test_a_tenant_owns_what_it_can_have(
    name: str, own: list[str], share: bool, other: str, others_share: bool
) -> None:
    namespace = space(name, own, share=share)
    reader = Tenant(name=other, share=others_share)
    assert reader.owns(namespace) == (share == others_share and (share or name == other))
    assert OPERATOR.owns(namespace) == share


@given(names | st.just(""), st.text(alphabet="ab/@:.", min_size=1), names, st.text("ab/@:."))
def test_ids_of_tenants_meet_only_where_they_should(
    name: str, own: str, other: str, others: str
) -> None:
    assert unscoped(scoped(name, own)) == (name, own)
    assert (scoped(name, own) == scoped(other, others)) == ((name, own) == (other, others))
