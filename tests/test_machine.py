"""A report of a machine has what was found there, goes on after a failure, and names nobody."""

import json
import platform
import re
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flash_delta.testing import CASES, Isolated, Refused
from flash_delta.testing.matrix import Cell, Judge
from workshop.bench import few, runner, selection
from workshop.bench.workloads import WORKLOADS
from workshop.cli.app import app
from workshop.machine.page import NONE, table, write_machines
from workshop.machine.probe import Probe
from workshop.machine.report import PARTS, Report, without_names

ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
CPU = torch.device("cpu")


@pytest.fixture
def answers(monkeypatch):
    """The check answers at once: right, or what a test plants by (op, dtype, case). One row is timed."""
    planted = {}

    def case(self, name, case, dtype):
        cell = planted.get((name, dtype, case.name), Cell(name, dtype, case.name, "o", 1e-9, 1e-8))
        if isinstance(cell, Exception):
            raise cell
        return [cell]

    monkeypatch.setattr(Judge, "case", case)
    monkeypatch.setattr(selection, "FEW", {("cpu", "4/8 batch 1")})
    return planted


def report(folder, *arguments):
    ran = CliRunner().invoke(app, ["machine", "--device", "cpu", "--out", str(folder / "machine.json"), *arguments])
    return ran, json.loads((folder / "machine.json").read_text())


def test_a_report_has_every_part(answers, tmp_path):
    ran, data = report(tmp_path)
    assert ran.exit_code == 0, ran.output
    assert tuple(data) == PARTS
    assert data["machine"]["torch"] == torch.__version__
    assert data["backends"]["chunk_kda"]["backend"] == "torch"
    assert data["failures"] == []
    assert {line["case"] for line in data["check"]} == {case.name for case in CASES if case.smoke}
    assert data["check"][0]["errors"] == {"o": [1e-9, 1e-8, None]}
    (row,) = data["bench"]["results"]
    assert row["eager_ms"]["median"] > 0
    assert 0 < row["errors"]["o"] <= row["allowed"]["o"]
    assert Report.read(tmp_path / "machine.json").failures() == []


def test_a_failure_costs_its_own_row(answers, tmp_path, monkeypatch):
    answers["kda", "float32", "ragged"] = RuntimeError("no kernel for /home/somebody/cache/scan.py\nbecause")
    answers["gdn", "bfloat16", "packed"] = Cell("gdn", "bfloat16", "packed", "o", float("inf"), 1e-8)
    monkeypatch.setattr(runner, "PEERS_ALLOWED", -1.0)
    monkeypatch.setattr(runner, "allowed", lambda *_: -1.0)  # so every time's result is wrong
    monkeypatch.setattr(Isolated, "call", refusing(Isolated.call))
    ran, data = report(tmp_path)
    assert ran.exit_code == 1
    broken, wrong, crashed, untimed = data["failures"]
    assert broken == "backends: RuntimeError: no driver"
    assert crashed == "kda float32, case 'ragged': RuntimeError: no kernel for (path)/scan.py"
    assert wrong == "gdn bfloat16, case 'packed': o is off by inf, 1.0e-08 is allowed"
    assert untimed.startswith("gdn decode 4/8 batch 1: wrong: o is off by ")
    (line,) = (line for line in data["check"] if "failure" in line)
    assert "Traceback" in line["log"]
    assert line["log"].endswith("\nbecause")
    assert "somebody" not in (tmp_path / "machine.json").read_text()
    assert Report.read(tmp_path / "machine.json").failures() == data["failures"]


def refusing(call):
    def refuse(self, method, *arguments):
        if method == "backends":
            raise Refused("RuntimeError: no driver")
        return call(self, method, *arguments)

    return refuse


def test_what_the_check_found_survives_a_crash_of_the_timing(answers, tmp_path, monkeypatch):
    monkeypatch.setattr("workshop.cli.machine._timed", lambda *_: 1 / 0)
    ran, data = report(tmp_path)
    assert isinstance(ran.exception, ZeroDivisionError)
    assert len(data["check"]) > 100
    assert data["bench"] is None


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("ld: cannot open /home/some.body/lib/x.so: no", "ld: cannot open (path)/x.so: no"),
        ('File "/root/.venv/lib/jit.py", line 3', 'File "(path)/jit.py", line 3'),
        ("gcc -I/home/somebody/include -L~/lib/cuda", "gcc -I(path) -L(path)"),
        ("file:/tmp/somebody/k.ptx", "file:(path)/k.ptx"),
        (r"C:\Users\somebody\k.ptx is missing", "(path)/k.ptx is missing"),
        (f"on {platform.node()}: illegal address", "on (name): illegal address"),
        ("forward 16/32 1x8192, https://example.org/a/b", "forward 16/32 1x8192, https://example.org/a/b"),
        ("tests/a/b.py and s/w", "tests/a/b.py and s/w"),
        ("file:///home/somebody/x.py", "(path)/x.py"),
        ("b'err\\n/home/somebody/x.c'", "b'err\\n(path)/x.c'"),
        ("\x1b[1m/home/somebody/x.c\x1b[0m: no", "(path)/x.c: no"),
        ("cc -isystem/home/somebody -o/home/somebody/x.so", "cc -isystem(path) -o(path)/x.so"),
        ("../../home/somebody/x.cu", "(path)/x.cu"),
        ("C:\\\\Users\\\\somebody", "(path)"),
        ("~somebody/x.py and /somebody", "(path)/x.py and (path)"),
        ("HOME=/home/jane.doe", "HOME=(path)"),
        ("16/32 heads, 1.5 TB/s, https://example.org/a/b", "16/32 heads, 1.5 TB/s, https://example.org/a/b"),
    ],
)
def test_paths_and_the_host_are_taken_out(text, public):
    assert without_names([{"log": text}, 1]) == [{"log": public}, 1]


def test_facts_name_nobody():
    facts = Probe(CPU).machine()
    assert {"flash_delta", "python", "torch", "triton", "cpu", "system"} <= facts.keys()
    assert not any(platform.node() in str(value) or str(Path.home()) in str(value) for value in facts.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_report_of_a_gpu(tmp_path):
    """What this GPU is, rates for the floor, and a time or a reason for every row."""
    ran = CliRunner().invoke(app, ["machine", "--out", str(tmp_path / "machine.json")])
    found = Report.read(tmp_path / "machine.json")
    assert ran.exit_code == bool(found.failures()), ran.output
    assert {"gpu", "chip", "total_memory", "multi_processor_count"} <= found.machine.keys()
    assert found.bench.ceilings.measured_bytes_per_s > 0
    assert len(found.bench.results) == len(few(torch.device("cuda")))
    assert all((result.ms is None) == (result.reason is not None) for result in found.bench.results)


def test_the_few_rows_exist():
    names = {(w.group, w.name) for w in WORKLOADS}
    assert names >= selection.FEW
    assert {w.group for w in few(CPU)} == {"cpu"}
    assert {(w.member, w.kind) for w in few(torch.device("cuda"))} == {
        (member, kind) for member in ("gdn", "kda") for kind in ("forward", "training", "decode")
    }


def test_the_table_has_a_row_for_each_report(answers, tmp_path):
    answers["kda", "float32", "ragged"] = RuntimeError("no kernel")
    page = tmp_path / "machines.md"
    page.write_text((ROOT / "docs/machines.md").read_text().replace(NONE, "old"))
    write_machines(tmp_path / "none", page)
    assert NONE in page.read_text()
    (tmp_path / "machines").mkdir()
    report(tmp_path / "machines")
    write_machines(tmp_path / "machines", page)
    head, _, row = re.search(r"report: machines -->\n(.*?)\n<!--", page.read_text(), re.DOTALL)[1].splitlines()
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    cases = len(Report.read(tmp_path / "machines/machine.json").check)
    assert cells["report"] == "machine.json"
    assert cells["cases that are right"] == f"{cases - 1} of {cases}"
    assert cells["what failed"] == "kda float32"
    assert float(cells["gdn decode 4/8 batch 1, ms"]) > 0


def test_the_committed_table_is_that_of_the_committed_reports(tmp_path):
    page = ROOT / "docs/machines.md"
    (tmp_path / "machines.md").write_text(page.read_text())
    write_machines(ROOT / "benchmarks/results/machines", tmp_path / "machines.md")
    assert (tmp_path / "machines.md").read_text() == page.read_text(), "run flash-delta-dev report"


def test_another_file_is_no_report(tmp_path):
    (tmp_path / "other.json").write_text('{"machine": {}}')
    with pytest.raises(ValueError, match=r"results: expected a file that `flash-delta-dev machine` wrote, got .*other"):
        table({"other.json": Report.read(tmp_path / "other.json")})


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms(path):
    """A form has a name, a description and fields with ids of their own. The machine's form names the command."""
    form = yaml.safe_load(path.read_text())
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert form["name"]
    assert form["description"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)
    if path.stem == "machine":
        assert [part["id"] for part in fields] == ["gpu", "report", "seen"]
        assert "flash-delta-dev machine --out machine.json" in form["body"][0]["attributes"]["value"]
        assert f'"{form["name"]}"' in (ROOT / "docs/machines.md").read_text()
