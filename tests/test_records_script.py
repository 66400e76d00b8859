"""scripts/records.py: which commands are needed, and where their records go."""

import json
import sys
from pathlib import Path

import pytest

from tilewright import record, registry, settings, source
from tilewright.worker.memory import OTHERS

OPS = ("gelu", "adamw", "cross_entropy", "unique")


@pytest.fixture(scope="module")
def script():
    return registry.load_module(Path(__file__).parent.parent / "scripts" / "records.py")


@pytest.fixture(scope="module")
def ops():
    return [registry.load(name) for name in OPS]


def commands(script, step, ops, found=()):
    return [str(one) for one in script.missing(step, ops, found)]


def made(kind, op, kernel, **more):
    return record.stamp(kind, op, kernel, source.kernel_hash(op, kernel) or "", **more)


def timing(op, kernel, case, direction="forward", **more):
    return made("timing", op, kernel, case=dict(case.point), dtype="bfloat16", direction=direction, **more)


def test_without_records_everything_is_missing(script, ops):
    assert commands(script, "verdicts", ops) == [
        "tilewright check gelu -k triton -k cuda",
        "tilewright check adamw -k triton",
        "tilewright check cross_entropy -k triton -k cuda",
        "tilewright check unique -k triton",
    ]
    assert commands(script, "timings", ops) == [
        "tilewright bench gelu,unique -k eager -k compile -k tilewright --direction forward --samples 25",
        "tilewright bench gelu -k eager -k compile -k tilewright --direction backward --samples 25",
        "tilewright bench adamw -k eager -k compile -k fused -k triton --direction forward --samples 25",
        "tilewright bench cross_entropy -k eager -k compile -k tilewright --direction both --samples 25",
    ]
    assert commands(script, "counters", ops) == [
        "tilewright profile gelu,cross_entropy,unique -s ncu --direction forward",
        "tilewright profile gelu,cross_entropy -s ncu --direction backward",
    ]
    assert commands(script, "sizes", ops) == [
        "tilewright bench gelu --sizes --direction forward --samples 15",
        "tilewright bench cross_entropy --sizes --direction both --samples 15",
    ]


def test_fresh_records_are_not_measured_again(script, ops):
    op, one = ops[0], "tilewright bench gelu -k {} --direction forward --samples 25"
    fresh = [timing(op.name, kernel, case) for case in op.bench for kernel in ("eager", "compile", "tilewright")]
    assert commands(script, "timings", [op], fresh)[0].endswith("--direction backward --samples 25")
    assert commands(script, "timings", [op], fresh[:-1])[0] == one.format("tilewright")
    assert len(commands(script, "timings", [op], [r | {"sized": True} for r in fresh])) == 2
    both = [op, ops[-1]]
    assert commands(script, "timings", both, fresh[:-1])[::2] == [
        one.format("tilewright"),
        "tilewright bench unique -k eager -k compile -k tilewright --direction forward --samples 25",
    ]
    fresh[0]["source"] = "older"
    assert commands(script, "timings", [op], fresh)[0] == one.format("eager")


def test_only_right_verdicts_count(script, ops):
    right = made("verdict", "gelu", "triton", verdict="right", labels=[])
    wrong = made("verdict", "gelu", "cuda", verdict="wrong", labels=[])
    assert commands(script, "verdicts", ops[:1], [right, wrong]) == ["tilewright check gelu -k cuda"]


def test_checks_that_lacked_memory_are_repeated(script, ops):
    cramped = made("verdict", "gelu", "cuda", verdict="right", labels=[f"1 left out: not in the 1 GiB {OTHERS}"])
    other = made("verdict", "adamw", "triton", verdict="right", labels=["3 left out: they do not fit in the 139 GiB"])
    two = [op for op in ops if op.name in ("gelu", "adamw")]
    assert commands(script, "verdicts", two, [cramped, other]) == ["tilewright check gelu -k triton -k cuda"]


def test_records_go_to_the_file_of_their_operation(script, tmp_path, monkeypatch):
    gelu, unique = (
        record.read(settings.results_dir() / "h200" / f"{op}.jsonl").records[0] for op in ("gelu", "unique")
    )

    def run(command, **_):
        Path(command[-1]).write_text("".join(json.dumps(one) + "\n" for one in (gelu, unique, gelu)))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.perform(script.Step(("bench", "gelu,unique")), tmp_path)
    assert len(record.read(tmp_path / "gelu.jsonl").records) == 2
    assert len(record.read(tmp_path / "unique.jsonl").records) == 1
    assert script.perform(script.Step(("profile", "gelu"), "counters.jsonl"), tmp_path)
    assert len(record.read(tmp_path / "counters.jsonl").records) == 3

    def interrupted(command, **_):
        run(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(script.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.perform(script.Step(("bench", "gelu,unique")), tmp_path)
    assert len(record.read(tmp_path / "gelu.jsonl").records) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "h20"), "did you mean"),
        (("plan", "--ops", "sum,sofmax"), "no operation named 'sofmax'; did you mean 'softmax'?"),
        (("run", "timings", "nonsense"), "unknown step 'nonsense'; choose from verdicts, timings"),
        (("run",), "no GPU found"),
        ((), "required: command"),
    ],
    ids=("GPU", "operation", "step", "no GPU", "nothing"),
)
def test_bad_arguments_are_an_error_of_one_line(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["records.py", *arguments])
    monkeypatch.setattr(script.hardware, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_each_dtype_needs_its_own_timing(script, ops):
    """AdamW is benched with parameters of two dtypes."""
    adamw = ops[1]
    found = [timing("adamw", name, case) for name in adamw.kernels for case in adamw.bench]
    assert "bench adamw" in commands(script, "timings", [adamw], found)[0]
    found += [one | {"dtype": "float32"} for one in found]
    assert commands(script, "timings", [adamw], found) == []
