"""docs/clients.md says what the tests exercise."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_page_is_fresh() -> None:
    path = Path(__file__).with_name("table.py")
    spec = importlib.util.spec_from_file_location("clients_table", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.PAGE.read_text() == table.page(), "run `python test/e2e/clients/table.py`"
