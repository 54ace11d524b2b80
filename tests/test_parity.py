"""Loss parity: `flash-delta-dev parity` on a CPU, where both contestants run in PyTorch, and its verdict."""

import copy
import json

import pytest
from typer.testing import CliRunner

from workshop.cli.app import app
from workshop.parity.verdict import verdict

SIZES = "--steps=20 --layers=1 --heads=2 --head-dim=16 --batch-size=2 --seq-len=32 --device=cpu"
NAMES = ("torch", "flash_delta")


def parity(*arguments):
    return CliRunner().invoke(app, ["parity", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of runs on one text, and the arguments of the command."""
    out, text = tmp_path_factory.mktemp("parity"), tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{i} and {i * i % 97} are numbers.\n" for i in range(400)))
    arguments = [out, *SIZES.split(), "--paths", text, "--contestants", ",".join(NAMES)]
    result = parity(*arguments)
    assert result.exit_code == 0, result.output
    return out, arguments


def read(folder):
    return {name: [json.loads((folder / f"{name}-{seed}.json").read_text()) for seed in range(3)] for name in NAMES}


def test_two_contestants_train_the_same(folder):
    """float32 and bfloat16 differ, but by less than seeds do. Each seed has windows and parameters of its own."""
    out, _ = folder
    records, found = read(out), json.loads((out / "parity.json").read_text())
    assert found == verdict(records)
    assert found["right"] is True
    assert found["first_run"]["compiled"] is False
    difference = found["pairs"][0]["difference"]
    assert all(0 < difference[name] < 0.1 * found["spread"][name] for name in ("training", "held_out"))
    dtypes = {name: {record["settings"]["dtype"] for record in runs} for name, runs in records.items()}
    assert dtypes == {"torch": {"float32"}, "flash_delta": {"bfloat16"}}
    assert all(len(record["losses"]) == 20 for runs in records.values() for record in runs)
    assert len({record["losses"][0] for record in records["torch"]}) == 3


def test_records_that_are_there_are_kept(folder):
    """A missing one is made again, with the same losses."""
    out, arguments = folder
    before = read(out)
    (out / "torch-1.json").unlink()
    written = (out / "torch-0.json").stat().st_mtime_ns
    assert parity(*arguments).exit_code == 0
    assert (out / "torch-0.json").stat().st_mtime_ns == written
    assert read(out)["torch"][1]["losses"] == before["torch"][1]["losses"]


@pytest.mark.parametrize(
    ("option", "field"),
    [("--steps=21", "steps"), ("--mixers=kda", "mixers"), ("--layers=2", "layers"), ("--compile", "compiled")],
)
def test_records_of_other_runs_are_refused(folder, option, field):
    result = parity(*folder[1], option)
    assert result.exit_code == 2
    assert f"out: expected records with {field} " in result.output.replace("\n", " ")


@pytest.mark.parametrize("what", ["losses", "held_out"])
def test_a_contestant_that_learns_less_is_found(folder, what):
    records = read(folder[0])
    spread = verdict(records)["spread"]["training" if what == "losses" else "held_out"]
    worse = copy.deepcopy(records)
    for record in worse["flash_delta"]:
        more = [loss + 1.5 * spread for loss in record["losses"]]
        record |= {"losses": more} if what == "losses" else {"held_out": record["held_out"] + 1.5 * spread}
    assert verdict(worse)["right"] is False


def test_what_cannot_be_compared_is_refused(folder):
    records = read(folder[0])
    with pytest.raises(ValueError, match="records: expected two contestants or more"):
        verdict({"torch": records["torch"]})
    with pytest.raises(ValueError, match="with the same two seeds or more"):
        verdict({"torch": records["torch"], "flash_delta": records["flash_delta"][::-1]})
    records["flash_delta"][0]["corpus"] = "other"
    with pytest.raises(ValueError, match="records: expected one text and the same settings"):
        verdict(records)
    for option, value, name in (
        ("--contestants", "torch,mamba", "contestants"),
        ("--mixers", "gla", "mixers"),
        ("--mixers", "gdn,kda", "mixers"),
        ("--mixers", "attention", "mixers"),
        ("--mixers", "gdn,attention", "layers"),
    ):
        result = parity(*folder[1], option, value)
        assert result.exit_code == 2
        assert f"{name}: expected " in result.output


def test_records_that_do_not_say_whether_they_were_compiled_are_refused(folder, tmp_path):
    """Those of earlier versions."""
    record = json.loads((folder[0] / "torch-0.json").read_text())
    del record["compiled"]
    (tmp_path / "torch-0.json").write_text(json.dumps(record))
    result = parity(tmp_path, *folder[1][1:])
    assert result.exit_code == 2
    assert "out: expected records with compiled False" in result.output.replace("\n", " ")
