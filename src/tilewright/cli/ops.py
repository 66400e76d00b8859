"""`tilewright ops`"""

from __future__ import annotations

import json

from tilewright import source
from tilewright.cli.shared import AsJson, console, say_next


def ops(as_json: AsJson = False) -> None:
    """List the operations and the kernels that compute them."""
    entries = [(name, source.read(path)) for name, path in source.op_files().items()]
    if as_json:
        for name, entry in entries:
            print(json.dumps({"op": name, "summary": entry.summary, "kernels": entry.kernels}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", "what it computes", "kernels"):
        table.add_column(column)
    for name, entry in entries:
        table.add_row(name, entry.summary, ", ".join(entry.kernels))
    console().print(table)
    say_next("tilewright check OP   or   tilewright bench OP")
