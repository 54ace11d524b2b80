"""The command line: what each command prints and writes, and what its errors look like."""

import html
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import flash_delta
from flash_delta.cli.app import app
from flash_delta.cli.train import train_command
from flash_delta.training import Run, load_model, require_checkpoint

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
    result = flash("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("info", "check", "train", "generate", "report"))


def test_info_says_what_is_here_and_which_backend_runs():
    result = flash("info")
    assert result.exit_code == 0, result.output
    for words in (flash_delta.__version__, "torch", "transformers", "cpu", "chunk_kda", "chosen"):
        assert words in result.output


def test_train_leaves_a_checkpoint_a_history_and_a_curve(run):
    written = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    checkpoint = ("config.json", "model.safetensors", "optimizer.safetensors", "trainer.json")
    assert {f"checkpoints/step-00000004/{name}" for name in checkpoint} <= written
    assert {"history.json", "loss.png"} <= written


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
    one, other = Run.read(run), Run.read(tmp_path)
    assert other.config == one.config
    assert [record.bits_per_byte for record in other.records] == [record.bits_per_byte for record in one.records]


def test_what_no_command_trains_has_none(run):
    found = Run.read(run)
    config = load_model(require_checkpoint(run)).config
    assert train_command(found, config, run).startswith("flash-delta train")
    assert train_command(replace(found, config=replace(found.config, warmup_steps=7)), config, run) is None
    config.expand_v = 2.0
    assert train_command(found, config, run) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train /nowhere/at/all", "error: paths: expected files or folders, got /nowhere/at/all"),
        ("train --mixers gdn,mamba --layers 2", "error: mixers: expected names among"),
        ("train --mixers gdn,kda --layers 1", "error: layers: expected at least the 2 that mixers lists, got 1"),
        ("train --resume --seq-len 9", "error: seq_len: expected no value beside --resume"),
        ("train --resume --out /nowhere", "error: run: expected a folder that `flash-delta train --out` wrote"),
        ("train --dtype half", "error: dtype: expected one of ['float32', 'bfloat16'], got 'half'"),
        ("train --accumulate 0", "error: accumulate: expected at least 1, got 0"),
        ("train --context-parallel 2", "error: context_parallel: expected a divisor of the number of ranks, 1, got 2"),
        ("train --device quantum", "error: device: expected one that torch can use here, got 'quantum'"),
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
    assert "with step-00000004: resume it" in result.stderr


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
def test_without_its_libraries_the_command_says_what_to_install(missing, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(missing=missing))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "flash_delta", "info"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert result.stderr.strip() == f"flash-delta: {missing} is missing; pip install 'flash-delta[train]' brings it"
