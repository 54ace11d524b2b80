"""What a run leaves behind when it diverges, is stopped or killed, or shares its folder; what goes on from there."""

import ast
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import TINY, flash
from test_training import CONFIG, tiny_model

import flash_delta
from flash_delta.page import Picture
from flash_delta.training import (
    Corpus,
    Diverged,
    Layout,
    Run,
    TrainConfig,
    Trainer,
    claim,
    latest_checkpoint,
    report,
    saving,
)
from flash_delta.training import checkpoint as checkpoint_module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return file


@pytest.fixture
def corpus(text):
    return Corpus.read([text])


@pytest.fixture
def quick_report(monkeypatch):
    """Without drawing, and with a short sample: test_training.py looks at whole ones."""
    monkeypatch.setattr(report, "picture", lambda title, reading, draw: Picture(title, reading, "", ""))
    monkeypatch.setattr(report, "SAMPLE_BYTES", 2)


def kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((folder / "checkpoints").iterdir())]


def one_line(result, code=2) -> str:
    """The error of a command that printed nothing else."""
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1), result.output
    return result.stderr


def at_step(monkeypatch, step: int, act) -> None:
    """Runs ``act(trainer)`` behind the training of that step."""
    train_step = Trainer._train_step

    def trained(trainer):
        record = train_step(trainer)
        if record.step == step:
            act(trainer)
        return record

    monkeypatch.setattr(Trainer, "_train_step", trained)


def spoil(trainer) -> None:
    next(trainer.model.parameters()).data.fill_(float("nan"))


def test_parameters_that_are_not_finite_are_not_saved(corpus, tmp_path, monkeypatch):
    config = replace(CONFIG, eval_every=4, steps=6)
    run = Trainer.start(tmp_path, tiny_model(), corpus, replace(config, eval_every=6))
    with monkeypatch.context() as patch:
        at_step(patch, 4, spoil)
        with pytest.raises(Diverged, match=r"step 4: parameters.*lower --lr, 0.003 now; .*step-00000002 is kept"):
            list(run.run())
    assert kept(tmp_path) == [2]
    resumed = Trainer.resume(tmp_path, learning_rate=1e-4)
    assert [record.step for record in resumed.run()] == [3, 4, 5, 6]
    assert resumed.records[-1].learning_rate < 1e-4


def test_an_evaluation_that_is_not_finite_ends_the_run(corpus, tmp_path, monkeypatch):
    at_step(monkeypatch, 2, spoil)
    with pytest.raises(Diverged, match=r"step 2: held-out bits per byte: nan: .* lower --lr.*no checkpoint"):
        list(Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).run())
    assert kept(tmp_path) == []


def test_moments_that_are_not_finite_are_not_saved(corpus, tmp_path, monkeypatch):
    def spoil_moment(trainer):
        next(iter(trainer.optimizer.state.values()))["exp_avg"][0] = float("inf")

    at_step(monkeypatch, 2, spoil_moment)
    with pytest.raises(Diverged, match="step 2: parameters"):
        list(Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).run())
    assert kept(tmp_path) == []


def test_a_run_that_diverges_says_so_in_one_line(text, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, spoil)
    result = flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: step 4: norm of the gradients: nan: the run diverged, lower --lr, 0.003")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("step-00000002 is kept\n")
    monkeypatch.undo()
    assert flash("train", "--resume", "--out", tmp_path, "--lr", 1e-3).exit_code == 0


@pytest.mark.parametrize(("keep", "expected"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_last_checkpoints_stay(corpus, tmp_path, keep, expected):
    (tmp_path / "checkpoints").mkdir()
    trainer = Trainer.start(
        tmp_path, tiny_model(), corpus, replace(CONFIG, checkpoint_every=1, eval_every=4), keep=keep
    )
    list(trainer.run())
    assert kept(tmp_path) == expected


def test_two_checkpoints_stay_by_default_and_foreign_files_too(corpus, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".DS_Store").touch()
    list(Trainer.start(tmp_path, tiny_model(), corpus, replace(CONFIG, checkpoint_every=1, eval_every=4)).run())
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".DS_Store", "step-00000003", "step-00000004"]


def test_keep_is_at_least_1(text, tmp_path):
    result = flash("train", text, "--out", tmp_path / "run", *TINY.split(), "--keep", 0)
    assert one_line(result) == "error: keep: expected at least 1, got 0\n"


@pytest.mark.parametrize("name", ["file", "file/below", "blocked"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_step(text, tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "checkpoints").touch()
    at_step(monkeypatch, 1, lambda trainer: pytest.fail("a step was computed"))
    error = one_line(flash("train", text, "--out", tmp_path / name, *TINY.split()))
    assert error.startswith(f"error: folder: expected a folder that can be written to, got {tmp_path / name} (")


def test_a_folder_is_written_to_before_the_first_step(text, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(claim.os, "fsync", full)
    error = one_line(flash("train", text, "--out", tmp_path, *TINY.split()))
    assert (
        error == f"error: folder: expected a folder that can be written to, got {tmp_path} (No space left on device)\n"
    )


def test_a_folder_without_room_for_a_checkpoint(text, tmp_path, monkeypatch):
    monkeypatch.setattr(claim.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
    error = one_line(flash("train", text, "--out", tmp_path, *TINY.split()))
    assert error.startswith("error: folder: expected ")
    assert f"GB of room for a checkpoint, got 9.9e-08 GB in {tmp_path}" in error


def test_a_disk_that_is_full_costs_no_checkpoint(text, tmp_path, monkeypatch):
    save_file = saving.save_file

    def full(tensors, path):
        if "00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(saving, "save_file", full)
    result = flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2)
    assert result.exit_code == 2
    expected = f"error: {tmp_path}/checkpoints/step-00000004: expected room and leave to write a checkpoint, got: "
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1
    assert kept(tmp_path) == [2]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(corpus, tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, Path.rename

    def flushed(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path, target):
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    run = Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).run()
    monkeypatch.setattr(saving.os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    next(run), next(run)
    there = events.index("step-00000002.tmp -> step-00000002")
    files = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json", "step-00000002.tmp"}
    assert files <= set(events[:there])
    assert events[there + 1 :] == ["checkpoints"]


def test_a_folder_belongs_to_one_trainer_at_a_time(corpus, tmp_path):
    first, second = (Trainer.start(tmp_path, tiny_model(), corpus, CONFIG) for _ in range(2))
    records = first.run()
    with pytest.raises(ValueError, match=f"folder: expected a folder that no other process trains in, got {tmp_path}"):
        second.run()
    list(records)
    with pytest.raises(ValueError, match=r"folder: expected no checkpoint as the newest, got step-00000004: another"):
        second.run()  # it would begin anew behind the other one's back
    assert list(Trainer.resume(tmp_path).run()) == []


def test_a_report_needs_no_lock(text, tmp_path, corpus, quick_report):
    run = Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).run()
    next(run), next(run)
    assert flash("report", tmp_path).exit_code == 0


def test_another_process_is_refused_and_a_killed_one_blocks_nothing(text, tmp_path):
    command = [sys.executable, "-m", "flash_delta", "train", text, "--out", tmp_path, *TINY.split()]
    steps = ["--steps", "1000000", "--checkpoint-every", "2"]
    with subprocess.Popen([*command, *steps], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: latest_checkpoint(tmp_path), process)
            expected = f"error: folder: expected a folder that no other process trains in, got {tmp_path}\n"
            assert one_line(flash("train", "--resume", "--out", tmp_path)) == expected
        finally:
            process.kill()
    done = Run.read(tmp_path).records[-1].step
    result = flash("train", "--resume", "--out", tmp_path, "--steps", done + 1)
    assert result.exit_code == 0, result.output
    assert len(kept(tmp_path)) == 2


def wait_for(there, process, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def heard():
    """Signals do what they do in a process that somebody started by hand."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_it_came_in(text, tmp_path, monkeypatch, number, code):
    before = signal.getsignal(number)
    at_step(monkeypatch, 3, lambda trainer: signal.raise_signal(number))
    result = flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2)
    assert result.exit_code == code, result.output
    held = f"{tmp_path}/checkpoints/step-00000003"
    line = f"stopped by {number.name} after step 3, which {held} holds; continue with --resume"
    assert result.stdout.splitlines()[-1] == line
    assert result.stderr == ""
    assert kept(tmp_path) == [2, 3]
    assert signal.getsignal(number) == before
    monkeypatch.undo()
    assert "step      4" in flash("train", "--resume", "--out", tmp_path).output


def test_an_ignored_signal_stays_ignored(text, tmp_path, monkeypatch, heard):
    """Ctrl-C is ignored where a shell runs a command in the background. It stays so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at_step(monkeypatch, 3, lambda trainer: signal.raise_signal(signal.SIGINT))
    result = flash("train", text, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 0, result.output
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.usefixtures("heard")
def test_a_second_signal_stops_at_once(text, tmp_path, monkeypatch):
    def twice(trainer):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    at_step(monkeypatch, 3, twice)
    result = flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2)
    assert (result.exit_code, result.stderr) == (130, "stopped\n")
    assert kept(tmp_path) == [2]


@pytest.mark.usefixtures("heard")
def test_a_signal_in_the_last_step_ends_a_finished_run(text, tmp_path, monkeypatch):
    at_step(monkeypatch, 4, lambda trainer: signal.raise_signal(signal.SIGTERM))
    result = flash("train", text, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 0
    assert "this model" in result.output


@pytest.mark.usefixtures("heard")
def test_a_stopped_run_can_end_where_it_is(text, tmp_path, monkeypatch, quick_report):
    at_step(monkeypatch, 3, lambda trainer: signal.raise_signal(signal.SIGTERM))
    flash("train", text, "--out", tmp_path, *TINY.split())
    assert "not measured yet" in report_page(tmp_path)
    result = flash("train", "--resume", "--out", tmp_path, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert "3 done of 3" in result.output


def report_page(folder):
    assert flash("report", folder).exit_code == 0
    return (folder / "report.html").read_text()


def test_more_steps_take_up_the_longer_schedule(text, tmp_path):
    assert flash("train", text, "--out", tmp_path, *TINY.split()).exit_code == 0
    result = flash("train", "--resume", "--out", tmp_path, "--steps", 6)
    assert result.exit_code == 0, result.output
    assert "4 done of 6" in result.output
    run = Run.read(tmp_path)
    rates = [record.learning_rate for record in run.records]
    assert rates[:4] == [replace(run.config, steps=4).learning_rate_at(step) for step in range(4)]
    assert rates[4:] == [run.config.learning_rate_at(step) for step in (4, 5)]
    assert run.config.steps == 6
    error = one_line(flash("train", "--resume", "--out", tmp_path, "--steps", 5))
    assert error == "error: steps: expected at least the 6 that are done, got 5\n"


def test_the_rate_rises_where_a_finished_run_goes_on():
    short, long = (TrainConfig(steps=steps, warmup_steps=0, learning_rate=1.0) for steps in (100, 200))
    assert short.learning_rate_at(99) == pytest.approx(0.1, abs=1e-3)
    assert long.learning_rate_at(100) == pytest.approx(0.55)
    assert long.learning_rate_at(199) == pytest.approx(0.1, abs=1e-3)


def test_a_finished_run_needs_no_corpus(tmp_path, quick_report):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    folder = tmp_path / "run"
    assert flash("train", text, "--out", folder, *TINY.split()).exit_code == 0
    text.unlink()
    assert f"{Run.read(folder).held_out:.3f}" in flash("report", folder).output
    page = (folder / "report.html").read_text()
    assert "quick" in page
    assert "1 files, 2,508 bytes to train on" in page
    assert flash("generate", folder, "--max-bytes", 3).exit_code == 0
    error = one_line(flash("train", "--resume", "--out", folder))
    assert error == f"error: paths: expected files or folders, got {text}, which does not exist\n"


def test_a_run_of_version_0_1_0_goes_on_and_is_reported_from_its_text(text, tmp_path, quick_report):
    assert flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2).exit_code == 0
    shutil.rmtree(latest_checkpoint(tmp_path))
    file = latest_checkpoint(tmp_path) / "trainer.json"
    content = json.loads(file.read_text())
    del content["corpus"]
    file.write_text(json.dumps(content))
    assert flash("report", tmp_path).exit_code == 0
    assert flash("train", "--resume", "--out", tmp_path).exit_code == 0


def test_a_run_among_its_texts_goes_on(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    folder = tmp_path / "runs" / "one"
    assert flash("train", tmp_path, "--out", folder, *TINY.split()).exit_code == 0
    result = flash("train", "--resume", "--out", folder, "--steps", 5)
    assert result.exit_code == 0, result.output


def test_no_module_of_one_system_is_imported():
    for path in Path(flash_delta.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {"fcntl", "msvcrt", "resource", "winreg"} & set(names), path


def test_steps_have_as_many_digits_as_names_of_checkpoints():
    from flash_delta.training.config import LARGEST_STEP

    assert checkpoint_module.checkpoint_folder(Path("run"), LARGEST_STEP).match(checkpoint_module.NAME)
    assert not checkpoint_module.checkpoint_folder(Path("run"), LARGEST_STEP + 1).match(checkpoint_module.NAME)


def test_layouts_are_numbers_too():
    with pytest.raises(ValueError, match=r"shard: expected a whole number, got 1\.5"):
        Layout(shard=1.5)
    with pytest.raises(ValueError, match="steps: expected a whole number, got '9'"):
        TrainConfig(steps="9")
