"""Load generator for any server that speaks OpenAI's chat protocol.

`workloads` says what is asked, `load` asks it and keeps the times, `prefix` knows how few prompt
tokens could have been computed, `report` turns all that into figures. Nothing here depends on the
rest of Phloem.
"""

from phloem.srt.bench.load import ChatClient, run_workload
from phloem.srt.bench.report import Summary, render_table, summarise
from phloem.srt.bench.workloads import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "ChatClient",
    "Summary",
    "Workload",
    "render_table",
    "run_workload",
    "summarise",
]
