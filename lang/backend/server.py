"""What backends over HTTP have in common: a transport, the model's name, an end."""

from __future__ import annotations

from phloem.lang.backend import openai_wire
from phloem.lang.backend.base import BackendInfo
from phloem.lang.backend.http_transport import Transport


class ServerBackend:
    """A model behind `transport`; which one is asked of the server when `model` is None."""

    def __init__(self, transport: Transport, model: str | None) -> None:
        self._transport = transport
        self._info = None if model is None else BackendInfo(model)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    @property
    def base_url(self) -> str:
        """The URL that its requests begin with."""
        return self._transport.base_url

    async def info(self) -> BackendInfo:
        if self._info is None:
            self._info = await self.first_model()
        return self._info

    async def first_model(self) -> BackendInfo:
        """Asks the server anew, whatever `model` was given."""
        return BackendInfo(*openai_wire.models(await self._transport.get("/v1/models"))[0])

    async def aclose(self) -> None:
        await self._transport.aclose()

    def close(self) -> None:
        """`aclose` for programs without an event loop."""
        self._transport.close()
