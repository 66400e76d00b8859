"""docs/mcp.md: its table of tools and its session are what the server does."""

from pathlib import Path

import anyio
import pytest

from tilewright import registry


@pytest.mark.slow
def test_the_session_in_the_docs_is_true():
    script = registry.load_module(Path(__file__).parents[2] / "scripts" / "agents_page.py")
    old = script.PAGE.read_text()
    assert script.page(old, *anyio.run(script.record)) == old, "run `python scripts/agents_page.py`"
