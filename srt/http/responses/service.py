"""What the routes share: the store, what runs in the background, and from a body to what is run."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import SERVING, Serving
from phloem.srt.http.responding import running
from phloem.srt.http.responses.asked import Asked
from phloem.srt.http.responses.inputs import Placed, read_input
from phloem.srt.http.responses.items import FunctionCallItem, Item
from phloem.srt.http.responses.protocol import ResponsesRequest
from phloem.srt.http.responses.replies import Response
from phloem.srt.http.responses.runs import Runs
from phloem.srt.http.responses.store import ResponseStore
from phloem.srt.http.responses.translate import prepare_response

FILE: Final = "responses.sqlite"


@dataclass(frozen=True)
class Responses:
    """`store` has what is over, `runs` what is not."""

    store: ResponseStore
    runs: Runs

    async def ask(
        self, body: ResponsesRequest, unknown: Sequence[str], ctx: Serving, caller: Caller
    ) -> Asked:
        """What is to be run for `body`; `unknown` are fields that it has beside the known ones.
        Raises `InvalidRequest` with the field's path, and `NotFound` for another model."""
        tenant = caller.tenant.name
        items: list[Placed] = []
        if body.previous_response_id is not None:
            before = await self.store.conversation(tenant, body.previous_response_id)
            # A call that was cut off was not made, and nobody can answer it.
            items += [
                Placed(item, "previous_response_id")
                for item in before
                if not isinstance(item, FunctionCallItem) or item.status == "completed"
            ]
        sent: list[Item] = []
        for one in read_input(body.input):
            if isinstance(one, Placed):
                item = one.item
            else:
                found = await self.store.item(tenant, one.id)
                if found is None:
                    raise InvalidRequest(
                        f"There is no item {one.id!r}.", param=f"{one.at}.id", code="item_not_found"
                    )
                item = found
            sent.append(item)
            items.append(Placed(item, one.at))
        id_ = f"resp_{uuid.uuid4().hex}"
        prepared = await prepare_response(body, ctx, caller, id_, items, unknown)
        return Asked(sent=sent, prepared=prepared)

    async def whole(self, asked: Asked, ctx: Serving, tenant: str) -> Response:
        """Run it to its end, and keep it. Raises what `running` raises."""
        answer = asked.answer()
        with asked.prepared.paths.translated():
            async with running(ctx, asked.prepared.call) as events:
                async for index, chunk in events:
                    answer.add(index, chunk)
        await self.keep(asked, answer.response, tenant)
        return answer.response

    async def keep(self, asked: Asked, response: Response, tenant: str) -> None:
        """Store what became of it, unless it is not to be stored."""
        if response.store:
            await self.store.save(tenant, response, asked.sent)


RESPONSES: Final = web.AppKey("responses", Responses)


async def responses_context(app: web.Application) -> AsyncIterator[None]:
    """For `app.cleanup_ctx`: has the store, opened when it is first needed, and closes it."""
    data_dir = app[SERVING].data_dir
    store = ResponseStore(None if data_dir is None else data_dir / FILE)
    service = app[RESPONSES] = Responses(store, Runs(store))
    yield
    await service.runs.close()
    await store.close()


def responses_of(request: web.Request) -> Responses:
    return request.config_dict[RESPONSES]
