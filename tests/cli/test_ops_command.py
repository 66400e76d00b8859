"""`tilewright ops OP` shows from which size on calls run our kernel."""

import json

import pytest

from cli.command import assert_one_line, in_process
from tilewright import hardware


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    return in_process("ops", monkeypatch, capsys)


def test_crossovers_are_shown_for_every_gpu(command):
    done = command("softmax")
    assert done.returncode == 0, done.stderr
    assert "from 2^21 elements" in done.stdout
    found = {one["gpu"]: one for one in json.loads(command("softmax", "--json").stdout)["crossovers"]}
    assert found.keys() == hardware.DATASHEETS.keys()
    assert (found["h200"]["used"], found["h200"]["source"]) == ("from 2^21 elements", "measured")
    assert (found["l4"]["used"], found["l4"]["source"]) == ("from 2^17 elements", "computed from the datasheet")
    assert (found["h200"]["captured"], found["h200"]["captured_source"]) == ("at every size", "measured")
    assert (found["l4"]["captured"], found["l4"]["captured_source"]) == ("at every size", "computed without host time")
    dot = {one["gpu"]: one for one in json.loads(command("dot", "--json").stdout)["crossovers"]}
    assert dot["l4"]["captured_source"] == "not measured: as in eager mode"


def test_ops_without_crossovers_and_unknown_ops(command):
    assert "rope has no crossover" in command("rope").stdout
    assert "never" in command("relu").stdout
    assert "at every size" in command("swiglu").stdout
    assert_one_line(command("sofmax"), 2, "sofmax")
