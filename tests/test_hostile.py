"""What a user may get wrong on the command line is one line that names the option or the file; so are files that are
not ours, cut off, or hold numbers that are none. Nothing is printed before it."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import TINY, flash, flash_dev
from test_runs import one_line

import flash_delta
from flash_delta.training import latest_checkpoint

BELOW_A_FILE = "text.txt/below"  # a folder or a file that cannot be made; nobody is kept out by permissions everywhere


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and a run on it, which is finished."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    result = flash("train", folder / "text.txt", "--out", folder / "run", *TINY.split())
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run, to spoil; the folder with the text is the one that commands run in."""
    monkeypatch.chdir(trained)
    return shutil.copytree(trained / "run", tmp_path / "run")


WRONG = {
    "layers": ["nan", "1e30", "-1", "0", "1", "10001", "1" + "0" * 30, "", "\udcff"],
    "hidden-size": ["0", "-1", "1000000000", "1" + "0" * 30],
    "heads": ["0", "-1", "3000000000"],
    "head-dim": ["0", "-1", "1000000000"],
    "mixers": ["", "gdn,,kda", "nan"],
    "steps": ["0", "-1", "inf", "1" + "0" * 30, "100000000"],
    "batch-size": ["0", "-1", "99999999", "1" + "0" * 30],
    "seq-len": ["0", "1", "-1", "90000000", "1" + "0" * 30],
    "lr": ["nan", "inf", "-inf", "0", "-1", "1e99", "1e4", "", "x"],
    "seed": ["-1", str(2**32), "nan"],
    "checkpoint-every": ["0", "-1", "1" + "0" * 30],
    "keep": ["0", "-1", "nan"],
    "dtype": ["", "half"],
    "device": ["", "cuda:99", "cpu:0", "meta", "\udcff"],
    "tokenizer": ["", "text.txt", BELOW_A_FILE],
    "report-to": ["paper", ","],
    "context-parallel": ["0", "-1", "7", "1" + "0" * 30],
    "shard": ["0", "-1", "7", "1" + "0" * 30],
    "accumulate": ["0", "-1", "3", "1" + "0" * 30],
    "out": ["", "text.txt", BELOW_A_FILE, "/dev/null"],
}
NAMES = {
    "heads": "num_heads|heads",
    "lr": "lr|learning_rate",
    "out": "out|folder",
    "accumulate": "accumulate|batch_size",
}


@pytest.mark.parametrize("option", WRONG)
def test_train_refuses(option, run):
    for value in WRONG[option]:
        error = one_line(flash("train", "text.txt", "--out", "new", *TINY.split(), f"--{option}", value))
        names = NAMES.get(option, option).split("|")
        assert any(name in error or name.replace("-", "_") in error for name in names), (value, error)
    assert not os.path.exists("new")


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ("--hidden-size 1048576 --layers 10000", "hidden_size, layers, heads, head_dim"),
        ("--heads 16384 --head-dim 16384", "hidden_size, layers, heads, head_dim"),
        ("--batch-size 99999999 --seq-len 99999999", "batch_size, seq_len"),
    ],
)
def test_sizes_that_no_memory_holds(sizes, named, run):
    error = one_line(flash("train", "text.txt", "--out", "new", *TINY.split(), *sizes.split()))
    assert error.startswith(f"error: {named}: expected sizes that fit into the "), error
    assert "GB of cpu, got sizes that need at least" in error


def test_the_memory_that_is_asked_for_is_not_overrated(run, monkeypatch):
    """Parameters are counted exactly, from one layer of each kind."""
    from flash_delta.cli.new_model import _parameters, model_config, new_model

    config = model_config(256, "gdn,kda,gdn,attention", 6, 32, 2, 16)
    assert _parameters(config) == new_model(config, 0).num_parameters()


@pytest.mark.parametrize("error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory.\nTried")])
def test_out_of_memory_is_one_line(error, run, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("flash_delta.cli.train.new_model", fail)
    assert one_line(flash("train", "text.txt", "--out", "new", *TINY.split())).startswith(
        "error: out of memory, take sm"
    )


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("flash_delta.cli.train.new_model", fail)
    assert isinstance(flash("train", "text.txt", "--out", "new", *TINY.split()).exception, RuntimeError)


@pytest.mark.parametrize("path", ["", "/nowhere", "/dev/zero", "/proc/self/mem"])
def test_train_refuses_texts(path, run):
    error = one_line(flash("train", path, "--out", "new", *TINY.split()))
    assert "paths" in error.lower()
    assert path in error


@pytest.mark.parametrize(
    ("option", "values"),
    {
        "prompt": [""],
        "max-tokens": ["-1", "1" + "0" * 30, "nan", ""],
        "temperature": ["nan", "inf", "-1", "1e99", "1e-300", ""],
        "top-k": ["0", "-1", "nan"],
        "seed": ["-1", str(2**63), "1" + "0" * 30],
        "device": ["", "meta", "quantum"],
    }.items(),
)
def test_generate_refuses(option, values, run):
    for value in values:
        error = one_line(flash("generate", run, f"--{option}", value))
        assert option in error or option.replace("-", "_") in error, error


def test_a_prompt_may_be_any_bytes_an_output_may_know_few_and_a_reader_may_go_away(run):
    command = [sys.executable, "-m", "flash_delta", "generate", run, "--max-bytes", "9000"]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--prompt", b"\xffthe \xc3\xa9"], env=environment, **pipes) as process:
        assert process.stdout.read(6) == b"?the \xe9"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("command", [["train", "--resume", "--out"], ["generate"], ["report"]])
@pytest.mark.parametrize("path", ["", "text.txt", BELOW_A_FILE, "/nowhere", "/proc"])
def test_a_folder_that_is_no_run(command, path, run):
    error = one_line(flash(*command, path))
    assert ("expected a path" if path == "" else path) in error


@pytest.mark.parametrize("out", ["", ".", BELOW_A_FILE, "/proc/nowhere/page.html"])
def test_report_refuses_where_it_cannot_write(out, run):
    error = one_line(flash("report", run, "--out", out))
    assert error.startswith("error: ")
    assert "out" in error
    assert out in error


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def cut_to_nothing(file):
    file.write_bytes(b"")


def text_instead(file):
    file.write_text("<html>not found</html>")


def bytes_instead(file):
    file.write_bytes(b"\xff\xfe\0\x80" * 9)


def remove(file):
    file.unlink()


def folder_instead(file):
    file.unlink()
    file.mkdir()


def tensors(change):
    def changed(file):
        content = load_file(file)
        change(content)
        save_file(content, file)

    return changed


def rename_one(content):
    content["foreign"] = content.pop(min(content))


def drop_one(content):
    del content[min(content)]


def add_one(content):
    content["foreign"] = torch.zeros(3)


def reshape_one(content):
    name = max(content, key=lambda name: content[name].numel())
    content[name] = content[name][:-1].clone()


def not_a_number(content):
    next(t for t in content.values() if t.dim() == 2)[0, 0] = float("nan")


def infinite(content):
    next(t for t in content.values() if t.dim() == 2)[0, 0] = float("inf")


def fields(**changes):
    def changed(file):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return changed


def field_of_settings(name, value):
    def changed(file):
        content = json.loads(file.read_text())
        content["settings"][name] = value
        file.write_text(json.dumps(content))

    return changed


ANY_FILE = [cut, cut_to_nothing, text_instead, bytes_instead, remove, folder_instead]
TENSORS = [tensors(c) for c in (rename_one, drop_one, add_one, reshape_one, not_a_number, infinite)]
SPOILED = {
    "checkpoint-4/model.safetensors": ANY_FILE + TENSORS,
    "checkpoint-4/config.json": [
        *ANY_FILE,
        lambda file: file.write_text("[]"),
        fields(num_hidden_layers="2"),
        fields(num_hidden_layers=3),
        fields(mixers=["gdn", "mamba"]),
        fields(hidden_size=64),
        fields(hidden_size="wide"),
        fields(num_heads=0),
    ],
    "checkpoint-4/trainer_state.json": [cut, cut_to_nothing, text_instead, bytes_instead],
    "run.json": [
        *ANY_FILE,
        lambda file: file.write_text("[]"),
        fields(settings=None),
        fields(settings={"unknown": 1}),
        fields(corpus={"name": "x"}),
        fields(corpus=[]),
        field_of_settings("paths", 3),
        field_of_settings("lr", float("nan")),
    ],
}
READERS = {
    "checkpoint-4/model.safetensors": ("train", "generate"),
    "checkpoint-4/config.json": ("train", "generate"),
    "checkpoint-4/trainer_state.json": ("report",),
    "run.json": ("train", "report"),
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, ways in SPOILED.items() for i in range(len(ways))])
def test_a_run_that_is_not_ours(name, number, run):
    SPOILED[name][number](run / name)
    commands = {"train": ["train", "--resume", "--out"], "generate": ["generate"], "report": ["report"]}
    for reader in READERS[name]:
        assert str(run) in one_line(flash(*commands[reader], run))


def test_a_checkpoint_with_nan_says_how_to_go_on(run):
    checkpoint = latest_checkpoint(run)
    tensors(not_a_number)(checkpoint / "model.safetensors")
    error = one_line(flash("train", "--resume", "--out", run))
    assert f"{checkpoint}: expected finite numbers, got " in error
    assert f"remove {checkpoint} to go on from the checkpoint before it" in error


def test_version_is_printed(capsys):
    result = flash("--version")
    assert (result.exit_code, result.stdout) == (0, f"flash-delta {flash_delta.__version__}\n")


@pytest.mark.parametrize("arguments", ["nosuch", "--nosuch", "train --nosuch", "generate", "info x", "train --steps"])
def test_wrong_usage_is_one_line(arguments):
    assert one_line(flash(*arguments.split())).startswith("error: ")


def command(words, *more):
    """A command of `flash-delta`, or, after "dev", of `flash-delta-dev`."""
    program, *arguments = words.split()
    run = flash_dev if program == "dev" else partial(flash, program)
    return run(*arguments, *more)


def test_the_bare_command_shows_its_help():
    result = flash()
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("check --case one-head --json text.txt/below", "json"),
        ("check --case one-head --json .", "json"),
        ("check --resume --json list.json", "json"),
        ("check --resume --json text.txt", "json"),
        ("check --processes 0", "processes"),
        ("check --processes 1000000000", "processes"),
        ("check --device meta", "device"),
        ("dev bench cpu --device cpu --timeout nan", "timeout"),
        ("dev bench cpu --device cpu --timeout inf", "timeout"),
        ("dev bench cpu --device cpu --timeout 0", "timeout"),
        ("dev bench cpu --device cpu --timeout 1e99", "timeout"),
        ("dev bench cpu --device cpu --results text.txt", "results"),
        ("dev bench cpu --device cpu --compare nowhere", "nowhere"),
        ("dev bench cpu --device cpu --compare list.json", "list.json"),
        ("dev bench cpu --device cpu --compare text.txt", "compare"),
        ("dev report --results nowhere", "results"),
        ("dev report --results . --out text.txt/below", "text.txt/below"),
        ("dev compile .x", "modules"),
        ("dev compile --target x", "target"),
        ("dev tune scan --device cpu", "device"),
    ],
)
def test_the_other_commands_refuse(arguments, named, run, monkeypatch):
    def work(*_, **__):
        pytest.fail("it began to work")

    monkeypatch.setattr("workshop.bench.run_group", work)
    monkeypatch.setattr("flash_delta.testing.judging.judge", work)
    with open("list.json", "w") as file:
        file.write("[1, 2]")
    assert named in one_line(command(arguments))


def test_an_empty_option_is_no_path(run):
    for option in ("check --json", "dev bench cpu --device cpu --results", "dev bench cpu --device cpu --compare"):
        assert "expected a path, got nothing" in one_line(command(option, ""))
    assert "case" in one_line(flash("check", "--case", ""))


def test_an_error_of_the_system_is_one_line(run, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error", "disk")

    monkeypatch.setattr("flash_delta.cli.train.new_model", fail)
    error = one_line(flash("train", "text.txt", "--out", "new", *TINY.split()))
    assert error == "error: [Errno 5] Input/output error: 'disk'\n"
