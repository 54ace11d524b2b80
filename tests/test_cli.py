"""The command line: what each command prints and writes, and what its errors look like."""

import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from forks import run_each
from typer.testing import CliRunner

import flash_delta
from flash_delta.cli.app import app
from flash_delta.cli.environment import THREADS, calm_threads
from flash_delta.training import read_history, read_run
from workshop.cli.app import app as dev_app

README = (Path(__file__).parent.parent / "README.md").read_text()
TINY = "--mixers gdn,kda --layers 2 --hidden-size 32 --heads 2 --head-dim 16 --steps 4 --batch-size 2 --seq-len 32"

# Makes a library missing in a Python that has it.
BLOCKER = """
import sys

class Blocker:
    def find_spec(name, path=None, target=None):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker)
"""


def flash(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def flash_dev(*arguments):
    return CliRunner().invoke(dev_app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """A run of four steps by the command itself."""
    folder = tmp_path_factory.mktemp("run")
    result = flash("train", text, "--out", folder, *TINY.split(), "--checkpoint-every", 2)
    assert result.exit_code == 0, result.output
    assert "step      2" in result.output
    assert "step      4" in result.output
    assert "order-0 entropy" in result.output
    assert "\x1b" not in result.output  # a pipe gets no control characters
    return folder


def test_help_names_the_commands():
    for program, commands in (
        (flash, "info check prove train generate report pack"),
        (flash_dev, "check bench report tune compile parity machine release"),
    ):
        result = program("--help")
        assert result.exit_code == 0
        assert re.findall(r"^  (\w+)  ", result.output.split("Commands:")[1], re.MULTILINE) == commands.split()


def test_info_says_what_is_here_and_which_backend_runs():
    result = flash("info")
    assert result.exit_code == 0, result.output
    for words in (flash_delta.__version__, "torch", "transformers", "cpu", "chunk_kda", "chosen"):
        assert words in result.output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--model", "Qwen2"), "model: expected one of Qwen3-Next, "),
        (("--model", "Qwen3-Next", "--tp", "3"), "tp: expected some of 1, 2, 4, 8 for Qwen3-Next, got 3"),
        (("--model", "Qwen3-Next", "--target", "sm_70"), "target: expected one of sm_80, "),
    ],
)
def test_a_pack_that_cannot_be(tmp_path, options, error):
    pytest.importorskip("triton", reason="Triton is not installed")
    result = flash("pack", *options, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert error in result.output
    assert not list(tmp_path.iterdir())


def test_train_leaves_checkpoints_and_a_model(run):
    written = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    model = ("config.json", "model.safetensors", "tokenizer.json")
    checkpoint = (*model, "optimizer.pt", "scheduler.pt", "trainer_state.json")
    assert {"run.json", *model, *(f"checkpoint-4/{name}" for name in checkpoint)} <= written


def test_train_resumes(run):
    result = flash("train", "--out", run, "--resume")
    assert result.exit_code == 0, result.output
    assert "4 done of 4" in result.output


def test_generate_continues_the_prompt_the_same_way_each_time(run):
    first, second = (flash("generate", run, "--prompt", "the qu", "--max-bytes", 30, "--seed", 3) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("the qu")
    assert len(first.stdout) > len("the qu\n")
    assert first.stdout == second.stdout


def test_report_writes_its_page(run):
    result = flash("report", run)
    assert result.exit_code == 0, result.output
    assert "bits per byte on held-out text, whose order-0 entropy is" in result.output
    assert "<!doctype html>" in (run / "report.html").read_text()


def test_the_report_has_the_command_that_trains_such_a_run(run, text, tmp_path):
    flash("report", run)
    (line,) = re.findall(r"<pre>(flash-delta train .*)</pre>", (run / "report.html").read_text())
    command = shlex.split(html.unescape(line))
    assert command[2] == str(text)
    assert command[command.index("--out") + 1] == str(run)
    assert "--device" not in command
    assert "--seed" not in command, "the default"
    command[command.index("--out") + 1] = str(tmp_path)
    result = flash(*command[1:])
    assert result.exit_code == 0, result.output
    assert read_run(tmp_path) == read_run(run)
    one, other = ([log.get("bits_per_byte") for log in read_history(folder)] for folder in (run, tmp_path))
    assert one == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train /nowhere/at/all", "error: paths: expected files or folders, got /nowhere/at/all"),
        ("train --mixers gdn,mamba --layers 2", "error: mixers: expected names among"),
        ("train --mixers gdn,kda --layers 1", "error: layers: expected at least the 2 that mixers lists, got 1"),
        ("train --resume --seq-len 9", "error: seq_len: expected no value with --resume"),
        ("train --resume --out /nowhere", "error: run: expected a folder that `flash-delta train --out` wrote"),
        ("train --dtype half", "error: dtype: expected one of ['float32', 'bfloat16'], got 'half'"),
        ("train --accumulate 0", "error: Invalid value for '--accumulate': "),
        ("train --context-parallel 2", "error: context_parallel: expected a divisor of the number of ranks, 1, got 2"),
        ("train --shard 2", "error: shard: expected 1 on cpu, where accelerate has no FSDP2, got 2"),
        ("train --report-to paper", "error: report_to: expected names of installed loggers, "),
        ("train --device cpu:0", "error: device: expected cpu or cuda (CUDA_VISIBLE_DEVICES chooses one), got"),
        ("train --tokenizer /nowhere", "error: tokenizer: expected one that transformers can load, got '/nowhere'"),
        ("train --device quantum", "error: device: expected a device that torch can use here, got 'quantum'"),
        ("generate /nowhere", "error: run: expected a folder that `flash-delta train --out` wrote"),
        ("report /nowhere", "error: run: expected a folder that `flash-delta train --out` wrote"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments, message):
    result = flash(*arguments.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_second_run_in_the_same_folder_is_an_error(run, text):
    result = flash("train", text, "--out", run, *TINY.split())
    assert result.exit_code == 2
    assert "with checkpoint-4: resume it" in result.stderr


def test_debug_shows_the_traceback():
    assert isinstance(flash("--debug", "generate", "/nowhere").exception, FileNotFoundError)


def test_the_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "flash_delta", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout


def test_a_rank_that_fails_ends_all(text, tmp_path):
    """The second one asks for more than the text has, when the first one waits for it."""
    train = f"{sys.executable} -m flash_delta train {text} --out {tmp_path} {TINY}"
    command = f"exec {train} --seq-len $((32 + RANK * 1000000))"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    result = subprocess.run([*launch, "bash", "-c", command], capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert "error: seq_len: expected at most the" in result.stderr
    assert not list(tmp_path.iterdir())


def test_help_needs_no_transformers_and_no_matplotlib():
    code = "import flash_delta.cli.app, sys; assert not {'transformers', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_two_commands_run_and_others_say_what_to_install(missing, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(missing=missing))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    commands = ("train", "info", "check --case one-token", "check --case nope", "check --help")
    train, info, check, wrong, usage = run_each(*(["-m", "flash_delta", *c.split()] for c in commands), env=environment)
    assert train.returncode == 2
    words = f"{missing} is missing, which all other commands need: pip install 'flash-delta[train]' brings it"
    assert train.stderr.strip() == f"flash-delta: {words}"
    assert info.stdout == flash("info").output
    assert check.returncode == 0, check.stderr
    assert re.search(r"(\d+) of \1 tensors are right", check.stdout)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: case: expected one of ragged, ")
    said = re.search(r"`check` with (.*?)\. All else", README, re.DOTALL)[1]
    assert {*re.findall("--[a-z]+", said), "--help"} == {*re.findall("--[a-z]+", usage.stdout)}


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        *((arguments, width) for arguments in ("info", "check --case one-token", "--help") for width in (40, 60)),
        *((arguments, 60) for arguments in ("check --help", "train --help")),
    ],
)
def test_a_narrow_terminal_cuts_nothing(arguments, width):
    """No line is too long, and none of the words that are there at any width is missing or cut."""
    outputs = [
        CliRunner().invoke(app, arguments.split(), env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})
        for columns in (width, 200)
    ]
    narrow, wide = (result.output for result in outputs)
    assert outputs[0].exit_code == 0
    assert max(map(len, narrow.splitlines())) <= width
    assert "\u2026" not in narrow
    words, found = (set(re.findall(r"\w+", text)) for text in (wide, narrow))
    assert words - found <= {"dp", "dA_log", "ddt_bias"}, "columns that are empty here are left out"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_color(terminal):
    """With NO_COLOR no escape code, on a terminal as in a pipe; and in a pipe none without it."""
    environment = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS")}
    environment |= {"NO_COLOR": "1", "TERM": "xterm-256color"} if terminal else {"TERM": "xterm-256color"}
    commands = ("info", "train --help", "train --resume --seq-len 9")
    programs = [["-m", "flash_delta", *c.split()] for c in commands]
    command = forks.command(*programs, imports=["torch", "transformers"])
    if not terminal:
        written = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment).stdout
    else:
        pty = pytest.importorskip("pty")
        mine, theirs = pty.openpty()
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        written = b""
        try:
            while part := os.read(mine, 65536):
                written += part
        except OSError:  # the other side is closed
            pass
        process.wait()
        os.close(mine)
    outputs = written.split(b"\0")[:-1]
    assert len(outputs) == len(commands)
    for output in outputs:
        assert output.strip()
        assert not re.search(rb"\x1b\[[\d;]*[34]\d", output), "a colour"
        assert terminal or b"\x1b" not in output


@pytest.mark.parametrize(
    ("environment", "device", "hidden_size", "threads"),
    [({}, "cpu", 128, 1), ({"OMP_NUM_THREADS": "7"}, "cpu", 128, 7), ({}, "cpu", 1024, 7), ({}, "meta", 128, 7)],
)
def test_a_small_model_takes_one_thread_unless_it_is_said(environment, device, hidden_size, threads, monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        calm_threads(torch.device(device), hidden_size)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_check_takes_one_thread(monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        assert flash("check", "--case", "all-empty").exit_code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
