"""Who may use a server, and on what terms: the file that `--tenants` names.

    [tenants.acme]
    key_sha256 = "5e88…42d8"   # SHA-256 of the API key, in hex; or a list of them
    weight = 2.0               # share of the server when it is full
    priority = 0               # added to each request's own
    kv_quota = 50_000          # KV slots its running requests may hold; by default no limit
    requests_per_minute = 600  # by default no limit, as for the next two
    tokens_per_minute = 90_000 # of prompts and outputs together
    max_concurrent = 16        # requests that run at once
    share = false              # true: its KV is in the namespace that is common to all who share
    scopes = ["inference"]     # and "admin": look into the cache, change it, change the order

Ids that clients choose (requests, programs) are made the tenant's own by `scoped`, so that nobody
can name, or run into, what is another's.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from phloem.srt.errors import InvalidRequest

OPTION: Final = "server.tenants"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_EMPTY_KEY: Final = hashlib.sha256(b"").hexdigest()
_LOCATED: Final = re.compile(r"(?P<detail>.*) - at `\$\.(?P<field>[^`]+)`", re.DOTALL)
_OWNER: Final = "@"  # no salt's length begins so, hence no common namespace
_SCOPED: Final = " "  # in no id that a client can choose


class Scope(StrEnum):
    INFERENCE = "inference"
    ADMIN = "admin"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One who is served. `weight` is what fair shares compare; `kv_quota`, in slots, bounds what
    running requests hold, `max_concurrent` how many they are, and the rates what is asked for in a
    minute (None: no bound). With `share`, KV is common with all who share."""

    name: str
    key_sha256: tuple[str, ...] = ()
    weight: float = 1.0
    priority: int = 0
    kv_quota: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    share: bool = False
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})

    @property
    def admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def limited(self) -> bool:
        """Whether there is a bound on what it may ask for."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)

    def namespace(self, *salts: str | None) -> str:
        """The namespace of KV for the salts that were given. Distinct salts never meet, nor do
        distinct tenants, unless they share."""
        given = [f"{len(salt)}:{salt}" for salt in salts if salt]
        return "/".join(given if self.share else [_OWNER + self.name, *given])

    def owns(self, namespace: str) -> bool:
        """Whether `namespace` is one of those that `namespace()` can give."""
        own = _OWNER + self.name
        if self.share:
            return not namespace.startswith(_OWNER)
        return namespace == own or namespace.startswith(f"{own}/")


OPERATOR: Final = Tenant(name="", share=True, scopes=frozenset(Scope))
"""Who holds `--api-key`; everybody, where no key is asked for."""


def scoped(tenant: str, name: str) -> str:
    """An id that a client of `tenant` chose, as the engine knows it. It has no space in it."""
    return f"{tenant}{_SCOPED}{name}" if tenant else name


def unscoped(name: str) -> tuple[str, str]:
    """Inverse of `scoped`: (tenant, id)."""
    tenant, _, own = name.rpartition(_SCOPED)
    return tenant, own


def load_tenants(path: str | Path) -> dict[str, Tenant]:
    """The tenants in a file, by name.

    Raises:
        InvalidRequest: naming file, table and field: the file cannot be read, is no TOML, has an
            unknown table or field, a value out of range, or one key twice.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"{path} is not TOML: {error}") from error
    for name in document:
        if name != "tenants":
            raise _invalid(f"{path}: {name} is unknown; there are only tables [tenants.NAME]")
    tables = document.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise _invalid(f"{path}: there is no tenant; each is a table [tenants.NAME]")
    tenants = {name: _tenant(path, name, table) for name, table in tables.items()}
    _check_keys(path, tenants)
    return tenants


_AtLeastOne = Annotated[int, Meta(ge=1)]


class _Table(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    key_sha256: str | list[str]
    weight: Annotated[float, Meta(gt=0)] = 1.0
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    kv_quota: _AtLeastOne | None = None
    requests_per_minute: _AtLeastOne | None = None
    tokens_per_minute: _AtLeastOne | None = None
    max_concurrent: _AtLeastOne | None = None
    share: bool = False
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)] = (Scope.INFERENCE,)


def _tenant(path: str | Path, name: str, value: object) -> Tenant:
    if not _NAME.fullmatch(name):
        raise _invalid(
            f"{path}: {name!r} is no name for a tenant: 1 to 64 letters, digits, '_', '.' and '-'"
        )
    at = f"{path}: [tenants.{name}]"
    if not isinstance(value, dict):
        raise _invalid(f"{at} is not a table")
    try:
        table = msgspec.convert(value, _Table)
    except msgspec.ValidationError as error:
        located = _LOCATED.fullmatch(str(error))
        told = f"{located['field']}: {located['detail']}" if located else str(error)
        raise _invalid(f"{at} {told}") from None
    if not math.isfinite(table.weight):
        raise _invalid(f"{at} weight: {table.weight} is not a finite number")
    keys = [table.key_sha256] if isinstance(table.key_sha256, str) else table.key_sha256
    return Tenant(
        name=name,
        key_sha256=tuple(_hash(at, key) for key in keys),
        weight=table.weight,
        priority=table.priority,
        kv_quota=table.kv_quota,
        requests_per_minute=table.requests_per_minute,
        tokens_per_minute=table.tokens_per_minute,
        max_concurrent=table.max_concurrent,
        share=table.share,
        scopes=frozenset(table.scopes),
    )


def _hash(at: str, text: str) -> str:
    found = text.lower()
    if not _HASH.fullmatch(found):
        raise _invalid(f"{at} key_sha256: a SHA-256 has 64 hexadecimal digits")
    if found == _EMPTY_KEY:
        raise _invalid(f"{at} key_sha256: this is the SHA-256 of nothing, not of a key")
    return found


def _check_keys(path: str | Path, tenants: dict[str, Tenant]) -> None:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        if not tenant.key_sha256:
            raise _invalid(f"{path}: [tenants.{name}] key_sha256: there is no key")
        for key in tenant.key_sha256:
            if key in owners:
                where = f"[tenants.{name}] key_sha256"
                raise _invalid(f"{path}: {where}: [tenants.{owners[key]}] has the same key")
            owners[key] = name


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=OPTION, code="invalid_value")
