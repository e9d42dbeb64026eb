"""Where programs run, by the names that SGLang programs use."""

from __future__ import annotations

import os
from typing import Any, Final, Protocol, Unpack, runtime_checkable

from phloem.lang.backend.anthropic import AnthropicBackend
from phloem.lang.backend.choose import BackendLike, as_backend, default_backend, refuse_to_block
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.http_transport import TransportOptions
from phloem.lang.backend.openai import OpenAIBackend
from phloem.lang.background import background
from phloem.lang.errors import UsageError

_OPENAI: Final = "https://api.openai.com/v1"
_COMPLETION_MODELS: Final = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")


@runtime_checkable
class Served(Protocol):
    """A backend whose server can be asked about itself."""

    async def flush_cache(self) -> None:
        """Drop all KV that no running request holds."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """What runs there."""
        ...


class RuntimeEndpoint(HttpBackend):
    """A Phloem server, which is asked at once what it serves.

    `verify` (certificates are always checked) and `chat_template_name` (the template is the
    server's) are SGLang's, and can only be left out.

    Raises `BackendUnavailable` when nobody answers, `ValueError` for those two.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | None = None,
        chat_template_name: str | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        if verify not in (None, True):
            raise ValueError(f"verify={verify!r}: certificates are checked against the system's")
        if chat_template_name is not None:
            raise ValueError("chat_template_name: the server renders chats by its own template")
        super().__init__(base_url, api_key=api_key, **options)
        self._model_name = background.wait_for(self.info()).model

    def get_model_name(self) -> str:
        """The served model."""
        return self._model_name

    def get_server_info(self) -> dict[str, Any]:
        """What runs there."""
        return background.wait_for(self.server_info())


class OpenAI(OpenAIBackend):
    """OpenAI's `model_name`, or one of a server with its API (`base_url`).

    Key and URL are those of the environment, `OPENAI_API_KEY` and `OPENAI_BASE_URL`, unless they
    are given. `is_chat_model` None: by the name.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        chat = model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
        super().__init__(
            base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI,
            api_key=api_key or os.environ.get("OPENAI_API_KEY"),
            model=model_name,
            kind="chat" if chat else "completions",
            **options,
        )


class Anthropic(AnthropicBackend):
    """Anthropic's `model_name`; the key is that of `ANTHROPIC_API_KEY` unless it is given."""

    def __init__(
        self,
        model_name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        where = base_url or os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com"
        super().__init__(
            model_name,
            api_key=api_key or os.environ.get("ANTHROPIC_API_KEY"),
            base_url=where,
            **options,
        )


def flush_cache(backend: BackendLike | None = None) -> bool:
    """Drop what the server (the default backend's, if none is given) has cached. False when the
    backend has no cache that it could be told to drop. Raises `BackendError` if that fails."""
    chosen = default_backend() if backend is None else as_backend(backend)
    if not isinstance(chosen, Served):
        return False
    refuse_to_block(chosen)
    background.wait_for(chosen.flush_cache())
    return True


def get_server_info(backend: BackendLike | None = None) -> dict[str, Any]:
    """What runs at the backend, or at the default one. Raises `UsageError` if it does not tell."""
    chosen = default_backend() if backend is None else as_backend(backend)
    if not isinstance(chosen, Served):
        raise UsageError(f"{chosen!r} tells nothing about its server")
    refuse_to_block(chosen)
    return background.wait_for(chosen.server_info())
