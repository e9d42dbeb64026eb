"""`phloem serve`"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phloem.srt.cli.banner import render_banner
from phloem.srt.cli.options import ConfigFile, ModelName, with_model
from phloem.srt.cli.outcome import start_errors_told
from phloem.srt.cli.terminal import TerminalProgress, set_up_logging
from phloem.srt.config import ServeConfig
from phloem.srt.resolve import check_ranges

if TYPE_CHECKING:
    from phloem.srt.launch import ReadyInfo


def serve(
    model: ModelName = None,
    /,
    *,
    options: ServeConfig | None = None,
    config: ConfigFile = None,
) -> int:
    """Serve a model over HTTP, in the OpenAI protocol and Phloem's own.

    The model is fetched first if it is not on this machine. Ends on Ctrl-C or SIGTERM, after
    running requests are done.
    """
    from phloem.srt.launch import serve as launch

    asked = with_model(options or ServeConfig(), model)
    check_ranges(asked)  # before anything is fetched or bound
    set_up_logging(asked.log.log_level)

    def on_ready(ready: ReadyInfo) -> None:
        text = render_banner(
            ready.url,
            ready.card,
            ready.resolved,
            ready.startup,
            needs_key=asked.server.api_key is not None or asked.server.tenants is not None,
        )
        print(text, flush=True)

    with start_errors_told():
        return launch(asked, on_ready, progress=TerminalProgress())
