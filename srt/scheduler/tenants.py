"""Fair shares: what each tenant has been served, by its weight, and what it may hold.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): the tenant with the least service per weight
goes first; one that comes back after a pause starts at the least of those that are active, so an
idle tenant saves nothing up and nobody has to make up for the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator grants a tenant: its weight among others, and the KV slots that its
    running requests may hold together (None: no bound)."""

    weight: float = 1.0
    kv_quota: int | None = None


_DEFAULT = TenantLimits()


@dataclass(slots=True)
class _Account:
    served: float
    waiting: int = 0
    running: int = 0


class Shares:
    """Service by tenant. A tenant that nobody configured has weight 1 and no quota; its account
    lasts while it has requests, those of configured tenants stay."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._accounts: dict[str, _Account] = {}

    def weight(self, tenant: str) -> float:
        return self._limits.get(tenant, _DEFAULT).weight

    def quota(self, tenant: str) -> int | None:
        return self._limits.get(tenant, _DEFAULT).kv_quota

    @property
    def tenants(self) -> list[str]:
        """All that are configured or have requests."""
        return list(dict.fromkeys((*self._limits, *self._accounts)))

    def served(self, tenant: str) -> float:
        """Tokens computed for `tenant`, divided by its weight, since it became active."""
        account = self._accounts.get(tenant)
        return account.served if account is not None else 0.0

    def joined(self, tenant: str) -> None:
        """A request of `tenant` waits."""
        self._active(tenant).waiting += 1

    def left(self, tenant: str) -> None:
        """A request of `tenant` waits no longer."""
        self._accounts[tenant].waiting -= 1
        self._forget_idle(tenant)

    def started(self, tenant: str) -> None:
        self._active(tenant).running += 1

    def stopped(self, tenant: str) -> None:
        self._accounts[tenant].running -= 1
        self._forget_idle(tenant)

    def waiting(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.waiting if account is not None else 0

    def running(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.running if account is not None else 0

    def charge(self, tenant: str, tokens: int) -> None:
        """`tokens` were computed for a running request of `tenant`."""
        self._accounts[tenant].served += tokens / self.weight(tenant)

    def _active(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(0.0)
        if not account.waiting and not account.running:
            others = [a.served for a in self._accounts.values() if a.waiting or a.running]
            account.served = max(account.served, min(others, default=0.0))
        return account

    def _forget_idle(self, tenant: str) -> None:
        account = self._accounts[tenant]
        if tenant not in self._limits and not account.waiting and not account.running:
            del self._accounts[tenant]
