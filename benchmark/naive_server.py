"""A baseline: transformers' `generate` behind the chat protocol, one request at a time.

    python benchmark/naive_server.py MODEL --port 8000

What one gets without a serving runtime: no batching, no prefix reuse. It knows only what the
benchmark asks; a JSON schema is refused.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import torch
import transformers
from aiohttp import web


class NaiveModel:
    """A GGUF file, dequantised, or a Hugging Face folder."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        source: dict[str, Any] = {}
        folder = path
        if path.is_file():
            folder, source = path.parent, {"gguf_file": path.name}
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **source)
        if source:
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **source
        )
        self.model.train(False)

    def encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Chat → token ids [1, n]."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids: torch.Tensor = encoded["input_ids"]
        return ids

    async def answer(
        self, ids: torch.Tensor, max_tokens: int, *, whole: bool
    ) -> AsyncIterator[str | int]:
        """The answer piece by piece, then the number of its tokens. `whole` ignores end tokens."""
        streamer: Any = transformers.AsyncTextIteratorStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
        if whole:
            options["min_new_tokens"] = max_tokens
        running = asyncio.create_task(
            asyncio.to_thread(self.model.generate, ids, streamer=streamer, **options)
        )
        async for piece in streamer:
            yield piece
        output = await running
        yield output.shape[1] - ids.shape[1]


class NaiveServer:
    """One lock around one model."""

    def __init__(self, model: NaiveModel) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("response_format") is not None or not body.get("stream"):
            raise web.HTTPBadRequest(text="only streamed answers without a schema")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self._lock:
            ids = self._model.encode(body["messages"])
            usage = {"prompt_tokens": ids.shape[1], "completion_tokens": 0}
            async for piece in self._model.answer(
                ids, body["max_tokens"], whole=bool(body.get("ignore_eos"))
            ):
                if isinstance(piece, int):
                    usage["completion_tokens"] = piece
                elif piece:
                    await _send(response, {"choices": [{"delta": {"content": piece}}]})
        await _send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        details = {"prompt_tokens_details": {"cached_tokens": 0}}
        await _send(response, {"choices": [], "usage": usage | details})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


async def _health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    server = NaiveServer(NaiveModel(arguments.model, getattr(torch, arguments.dtype)))
    app = web.Application()
    app.router.add_get("/health", _health)
    app.router.add_post("/v1/chat/completions", server.chat)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
