"""`flash-delta check` says what is wrong, loses nothing else, and shows whose error is whose."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from flash_delta.cli import checking
from flash_delta.cli.app import app
from flash_delta.testing import CASES, HARD, MEMBERS, make_inputs
from flash_delta.testing.judging import PEERS_DTYPES, Answer, PeerAnswer, names_of
from flash_delta.testing.matrix import STRESS, Cell, Judge, Stress
from flash_delta.testing.shared import Sharer, judge_shared
from flash_delta.testing.workload import Workload
from workshop.bench import Peer
from workshop.cli.app import app as dev_app

TINY = Workload("stress", "training", "gdn", 1, 2, 2, 70, K=16, V=16)


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def judge(monkeypatch):
    """Every answer is right, but those that a test plants in this dictionary, by (op, dtype)."""
    planted = {}

    def case(self, name, case, dtype):
        cell = planted.get((name, dtype), Cell(name, dtype, case.name, "o", 1e-9, 1e-8))
        if isinstance(cell, Exception):
            raise cell
        return [cell]

    monkeypatch.setattr(Judge, "case", case)
    return planted


def test_all_right(judge, tmp_path):
    result = run("--case", "ragged", "--json", tmp_path / "check.json")
    assert result.exit_code == 0, result.output
    assert "36 of 36 tensors are right" in result.output
    assert len(json.loads((tmp_path / "check.json").read_text())["cases"]) == len(MEMBERS) * 3


def test_a_wrong_tensor_and_a_crash_are_named_and_cost_nothing_else(judge, tmp_path):
    judge["kda", "float32"] = Cell("kda", "float32", "ragged", "dg", float("inf"), 1e-8)
    judge["gdn", "bfloat16"] = RuntimeError("no kernel\nbecause")
    result = run("--case", "ragged", "--json", tmp_path / "check.json")
    assert result.exit_code == 1
    assert "kda float32, case 'ragged': dg is off by inf, 1.0e-08 is allowed" in result.output
    assert "gdn bfloat16, case 'ragged': RuntimeError: no kernel" in result.output
    assert "34 of 35 tensors are right" in result.output
    lines = {(line["op"], line["dtype"]): line for line in json.loads((tmp_path / "check.json").read_text())["cases"]}
    assert lines["gdn", "bfloat16"]["failure"] == "RuntimeError: no kernel"
    assert lines["gdn", "float32"]["errors"] == {"o": [1e-9, 1e-8, None]}


def test_a_broken_run_goes_on_with_what_was_not_right(judge, tmp_path):
    path = tmp_path / "check.json"
    judge["kda", "float32"] = RuntimeError("no kernel")
    assert run("--case", "ragged", "--json", path).exit_code == 1
    before = json.loads(path.read_text())["cases"]
    judge.clear()
    judge["gdn", "float32"] = RuntimeError("judged twice")
    result = run("--case", "ragged", "--json", path, "--resume")
    assert result.exit_code == 0, result.output
    after = json.loads(path.read_text())["cases"]
    mended = {"op": "kda", "dtype": "float32", "case": "ragged", "errors": {"o": [1e-9, 1e-8, None]}}
    assert after == [mended if "failure" in line else line for line in before]


def test_results_of_another_machine_are_no_start(judge, tmp_path):
    path = tmp_path / "check.json"
    assert "resume: expected --json with an existing file to continue" in run("--resume", "--json", path).output
    path.write_text('{"machine": {"gpu": "another"}, "cases": []}')
    assert "resume: expected results of this machine" in run("--resume", "--json", path).output


def test_the_table_shows_the_torch_backend_and_peers_beside_ours():
    cells = [
        Cell("gdn", "bfloat16", "ragged", "o", 3e-3, 7e-3, 1.5e-3),
        Cell("gdn", "bfloat16", "repeats", "o", 0, 0),
        Cell("gdn", "bfloat16", "other", "dq", 9e-3, 7e-3),
    ]
    peers = {"fla": PeerAnswer({"o": 4e-3}, "no backward"), "cudnn": PeerAnswer({}, "it cannot")}
    answer = Answer("gdn", "bfloat16", "ragged", cells, peers=peers)
    columns = list(zip(*checking._table([answer], "here").rows, strict=True))
    assert columns[2] == ("ours", "torch", "fla, 1 cases")
    assert columns[3] == ("3e-03", "2e-03", "4e-03")
    assert columns[5] == ("9e-03!", "", "")
    assert not answer.right


def test_every_case_comes_with_other_widths(judge, tmp_path):
    path = tmp_path / "check.json"
    assert run("--widths", "--json", path).exit_code == 0
    asked = {line["case"] for line in json.loads(path.read_text())["cases"] if line["op"] == "gdn2"}
    assert asked == {f"{case.name} {K}x{V}" for case in CASES for K, V in ((60, 100), (24, 512))}
    case = next(case for case in CASES if case.name == "packed").at_widths(24, 512)
    assert make_inputs(case, MEMBERS["gdn"], torch.float32)["v"].shape == (1, 205, 4, 512)


def test_growing_states_are_told(judge):
    """The command tells of the cases that ran, and of no other."""
    result = run("--case", "growing-to-2")
    assert "case 'growing-to-2': an erase of GDN-2 stretches states by up to 1.34, 24 by 80\n" in result.output
    assert "'growing'" not in result.output
    assert "stretches" not in run("--case", "ragged").output


def test_hard_cases_have_rows_of_their_own(judge):
    """They run in bfloat16, on the ops that they are for. --full has them, too."""
    full, hard = (list(checking._jobs(*flags, None, torch.device("cpu"))) for flags in ((1, 0, 0), (0, 0, 1)))
    full, hard = ({names_of(job) for job in jobs} for jobs in (full, hard))
    assert hard < full
    assert {row[:2] for row in hard} == {(op, "bfloat16") for op in ("gdn", "kda", "delta-rule")}
    assert {row[2] for row in hard} == {case.name for case in HARD}
    assert len(HARD) == 14
    result = run("--hard")
    assert result.exit_code == 0, result.output
    assert "gdn, one-key-1.999" in result.output


def test_a_hard_case_is_judged_by_its_own_rule():
    case = replace(HARD[0], T=128, H=1, HV=1)
    cells = {cell.tensor: cell for cell in Judge(torch.device("cpu"), None).case("gdn", case, "bfloat16")}
    assert cells.keys() >= {"o", "final_state", "dq", "dg", "dinitial_state", "inferred o"}
    assert all(cell.right and cell.allowed >= 3 * cell.reference for cell in cells.values())
    assert min(cells[tensor].allowed for tensor in ("o", "inferred o")) >= 0.2
    forward = replace(HARD[-1], T=128, H=1, HV=1)
    (o, state) = Judge(torch.device("cpu"), None).case("gdn", forward, "bfloat16")
    assert (o.tensor, state.tensor) == ("inferred o", "inferred final_state")


def test_an_unknown_case_is_refused():
    result = run("--case", "raged")
    assert result.exit_code == 2
    assert f"case: expected one of {CASES[0].name}, " in result.output


def test_stress_rows_are_as_large_as_they_say():
    by_name = {(row.name, row.workload.member): row for row in STRESS}
    for member in ("gdn", "kda"):
        w = by_name["over 1,024 blocks", member].workload
        assert -(-w.T // 64) * w.N * w.HV > 1024
        w = by_name["over 2^31 elements", member].workload
        assert w.N * w.T * min(w.H * w.K, w.HV * w.V) > 2**31
        assert by_name["repeats", member].repeats == 100


def test_stress_judges_values_and_counts_differing_repeats(monkeypatch):
    here = Judge(torch.device("cpu"), None)
    cells = {cell.tensor: cell for cell in here.stress(Stress("values", "", TINY))}
    assert all(cell.right and cell.reference is not None for cell in cells.values())
    assert {"o", "final_state", "dq", "dg", "dinitial_state"} <= cells.keys()
    assert all(cell == cell._replace(error=0) for cell in here.stress(Stress("repeats", "", TINY, repeats=3)))
    calls = iter(range(3))
    monkeypatch.setattr(
        "flash_delta.testing.matrix.run_workload", lambda *_: {"o": torch.tensor([float(next(calls) == 2)])}
    )
    (cell,) = here.stress(Stress("repeats", "", TINY, repeats=3))
    assert (cell.error, cell.right) == (1, False)


def test_a_peer_is_judged_on_the_same_inputs():
    """The fallback of transformers runs here; it has no words for own scales and keeps no packed sequences apart."""
    peer, by_name = Peer("transformers", torch.device("cpu")), {case.name: case for case in CASES}
    right = peer.case("gdn", by_name["ragged"], "float32")
    assert right.reason is None
    assert {"o", "final_state", "dq", "dg", "dinitial_state"} <= right.errors.keys()
    assert max(right.errors.values()) < 1e-5
    assert max(peer.case("gdn", by_name["float32-gates"], "float32").errors.values()) < 1e-5  # norm and given gates
    repeated = peer.case("gdn", replace(HARD[0], T=128, H=1, HV=1), "bfloat16")
    assert {"o", "dq", "dg"} <= repeated.errors.keys()
    for name in ("in-kernel", "lower-bound"):  # KDA's gate in its two forms
        assert max(peer.case("kda", by_name[name], "float32").errors.values()) < 1e-5
    assert peer.case("gdn", by_name["scale"], "float32") == PeerAnswer({}, "peers' ops have no words for it")
    assert "packed" in peer.case("gdn", by_name["packed"], "float32").reason


class Here:
    """Stands for a process of its own."""

    def __init__(self, make, *_, **__):
        self.made = make()

    def call(self, method, *arguments):
        return getattr(self.made, method)(*arguments)

    def stop(self):
        pass


def test_the_developers_command_judges_peers(judge, monkeypatch):
    monkeypatch.setattr("flash_delta.testing.judging.Isolated", Here)
    monkeypatch.setattr(Peer, "case", lambda self, name, case, dtype: PeerAnswer({"o": 4e-3}))
    result = CliRunner().invoke(dev_app, ["check", "--case", "ragged", "--peers", "transformers"])
    assert result.exit_code == 0, result.output
    assert result.output.count("transformers, 1 cases") == len(MEMBERS) * len(PEERS_DTYPES)
    result = CliRunner().invoke(dev_app, ["check", "--peers", "nobody"])
    assert "contestant: expected one of " in result.output


SMALL = (
    Workload("shared", "training", "gdn", 1, 2, 2, 40, lengths=(40, 30), K=16, V=16, l2norm=True),
    Workload("shared", "prefill", "kda", 1, 1, 2, 9, lengths=(9, 1), K=16, V=16, l2norm=True, raw=True),
    Workload("shared", "decode", "gdn", 1, 2, 3, 4, lengths=(4, 4, 4), K=16, V=16),
)


def make_sharer(planted=False):
    sharer = Sharer(torch.device("cpu"), SMALL, size=8)
    if planted:
        call = sharer._call

        def damaged(row):
            run, seen = call(row), []

            def results():
                seen.append(row)
                found = run()
                if row.kind == "prefill" and len(seen) == 3:
                    found["o"][0, 4, 0, 3] = torch.nan
                return found

            return results

        sharer._call = damaged
    return sharer


def test_processes_that_share_a_gpu_are_judged_by_their_bits():
    clean, damaged = judge_shared(make_sharer, 1, 2) + judge_shared(partial(make_sharer, True), 1, 2)
    assert clean.right
    assert clean.failure is None
    assert {cell.tensor.split()[-1] for cell in clean.cells} >= {"o", "final_state", "dq", "dinitial_state"}
    (wrong,) = [cell for cell in damaged.cells if not cell.right]
    assert wrong.tensor.startswith("kda prefill")
    assert (wrong.tensor.split()[-1], wrong.error) == ("o", 1)


def test_only_a_gpu_can_be_shared():
    result = run("--shared")
    assert result.exit_code == 2
    assert "shared: expected a GPU" in result.output
