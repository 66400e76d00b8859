"""The command `tilewright ops`."""

from __future__ import annotations

import json

from tilewright import source
from tilewright.cli.options import AsJson
from tilewright.cli.shared import console, say_next, table


def ops(as_json: AsJson = False) -> None:
    """List the operations and their kernels."""
    entries = [(name, source.read(path)) for name, path in source.op_files().items()]
    if as_json:
        for name, entry in entries:
            print(json.dumps({"op": name, "summary": entry.summary, "kernels": entry.kernels}))
        return
    shown = table("op", "computes", "kernels")
    for name, entry in entries:
        shown.add_row(name, entry.summary, ", ".join(entry.kernels))
    console().print(shown)
    say_next("tilewright check OP   or   tilewright bench OP")
