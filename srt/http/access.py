"""Who calls, and what they may call: API keys, tenants, and the access that each route asks for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from phloem.srt.errors import Forbidden, InvalidRequest, Unauthorized
from phloem.srt.http.routes import Access, route_of
from phloem.srt.tenants import OPERATOR, Scope, Tenant

KEY_HEADER: Final = "X-Api-Key"

CALLER: Final = web.RequestKey("caller", Tenant)
"""Whose key a request came with."""

_SCOPES: Final = {Access.INFERENCE: Scope.INFERENCE, Access.ADMIN: Scope.ADMIN}


class Keyring:
    """The keys that are known, as hashes: the operator's, if there is one, and the tenants'."""

    def __init__(self, api_key: str | None, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = {OPERATOR.name: OPERATOR, **tenants}
        self._keys = [
            (bytes.fromhex(key), tenant) for tenant in tenants.values() for key in tenant.key_sha256
        ]
        if api_key is not None:
            digest = hashlib.sha256(api_key.encode()).digest()
            if any(digest == known for known, _ in self._keys):
                raise InvalidRequest("the API key is also a tenant's", param="server.api_key")
            self._keys.append((digest, OPERATOR))

    @property
    def asks(self) -> bool:
        """Whether a key is asked for: whether there is any."""
        return bool(self._keys)

    def caller(self, authorization: str, api_key: str = "") -> Tenant:
        """Whose key an `Authorization` header has, or else `X-Api-Key`; the operator where no key
        is asked for. Raises `Unauthorized`.

        The time it takes says nothing of the keys: hashes are compared, and always all of them.
        """
        if not self._keys:
            return OPERATOR
        scheme, _, token = (authorization or f"Bearer {api_key}").partition(" ")
        key = token.strip().encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(key).digest()
        found = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not key or not found:
            raise Unauthorized(
                f"A valid API key is needed: `Authorization: Bearer KEY` or `{KEY_HEADER}: KEY`."
            )
        return found[0]

    def acting_for(self, caller: Tenant, name: str | None) -> Tenant:
        """The tenant that a request is about: the caller, unless an admin names another ("" are
        all who share). Raises `Forbidden` and, for a name that there is not, `InvalidRequest`."""
        if name is None or name == caller.name:
            return caller
        if not caller.admin:
            raise Forbidden(
                "Only a key with the scope `admin` may name another tenant.",
                param="tenant",
                code="missing_scope",
            )
        if name not in self._tenants:
            raise InvalidRequest(
                f"There is no tenant {name!r}.", param="tenant", code="unknown_tenant"
            )
        return self._tenants[name]


def access_middleware(keyring: Keyring) -> Middleware:
    """Every route but the open ones and preflight wants a key, known route or not; then the
    route's own access decides."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        wanted = Access.KEY if route is None else route.access
        if wanted is Access.OPEN or request.method == hdrs.METH_OPTIONS:
            return await handler(request)
        headers = request.headers
        caller = keyring.caller(headers.get(hdrs.AUTHORIZATION, ""), headers.get(KEY_HEADER, ""))
        scope = _SCOPES.get(wanted)
        if scope is not None and scope not in caller.scopes:
            raise Forbidden(
                f"{request.method} {request.path} needs a key with the scope `{scope.value}`.",
                code="missing_scope",
            )
        request[CALLER] = caller
        return await handler(request)

    return check
