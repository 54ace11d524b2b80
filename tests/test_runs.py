"""What a run leaves behind when it diverges, is stopped or killed; what goes on from there."""

import ast
import signal
from pathlib import Path

import pytest
import torch
from test_cli import TINY, flash
from test_training import make
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import flash_delta
from flash_delta.page import Picture
from flash_delta.report import page
from flash_delta.training import (
    Corpus,
    Diverged,
    RunTrainer,
    latest_checkpoint,
    load_model,
    read_history,
    read_run,
    trainer,
)


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
    monkeypatch.setattr(page, "picture", lambda title, reading, draw: Picture(title, reading, "", ""))
    monkeypatch.setattr(page, "SAMPLE_TOKENS", 2)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def one_line(result, code=2) -> str:
    """The error of a command that printed nothing else."""
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1), result.output
    return result.stderr


def at_step(monkeypatch, step: int, act) -> None:
    """Runs ``act(trainer)`` behind the gradients of that step, before its update."""
    training_step = RunTrainer.training_step

    def trained(trainer, *args, **kwargs):
        loss = training_step(trainer, *args, **kwargs)
        if trainer.state.global_step == step - 1:
            act(trainer)
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", trained)


def spoil(trainer) -> None:
    next(trainer.model.parameters()).data.fill_(float("nan"))


def test_parameters_that_are_not_finite_are_not_saved(corpus, tmp_path, monkeypatch):
    at_step(monkeypatch, 2, spoil)
    monkeypatch.setattr(RunTrainer, "evaluate", lambda *_, **__: {})  # which would find them, too
    with pytest.raises(Diverged, match=r"step 2: parameter model.embed.*lower --lr, 0.003 now; no checkpoint"):
        make(tmp_path, corpus).train()
    assert kept(tmp_path) == []


def test_an_evaluation_that_is_not_finite_ends_the_run(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "sum_of_nats", lambda outputs, labels: torch.tensor(float("nan")))
    monkeypatch.setattr(trainer, "mean_of_nats", lambda outputs, *_, **__: outputs["logits"].mean())
    with pytest.raises(Diverged, match=r"step 2: eval_loss: nan: .* lower --lr.*no checkpoint"):
        make(tmp_path, corpus).train()
    assert kept(tmp_path) == []


def test_a_run_that_diverges_says_so_in_one_line_and_leaves_a_way_back(text, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, spoil)
    result = flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: step 4: parameter model.embed_tokens.weight: nan: the run diverged, lower --lr, 0.003"
    )
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("checkpoint-2 is kept\n")
    assert kept(tmp_path) == [2]
    monkeypatch.undo()
    assert flash("train", "--resume", "--out", tmp_path, "--lr", 1e-4).exit_code == 0
    assert [log["learning_rate"] < 1e-4 for log in read_history(tmp_path) if "loss" in log] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(("keep", "expected"), [(None, [3, 4]), (1, [4]), (9, [1, 2, 3, 4])])
def test_the_last_checkpoints_stay(text, tmp_path, keep, expected):
    options = [] if keep is None else ["--keep", keep]
    assert flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 1, *options).exit_code == 0
    assert kept(tmp_path) == expected


def test_a_run_killed_while_saving_keeps_the_checkpoint_before(text, tmp_path, monkeypatch):
    save = RunTrainer._save_rng_state

    def killed(trainer, folder):
        if "checkpoint-4" in folder:
            raise KeyboardInterrupt
        save(trainer, folder)

    monkeypatch.setattr(RunTrainer, "_save_rng_state", killed)
    assert flash("train", text, "--out", tmp_path, *TINY.split(), "--checkpoint-every", 2).exit_code == 130
    assert latest_checkpoint(tmp_path).name == "checkpoint-2"
    monkeypatch.undo()
    assert "2 done of 4" in flash("train", "--resume", "--out", tmp_path).output
    assert latest_checkpoint(tmp_path).name == "checkpoint-4"


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
    line = f"stopped by {number.name} after step 3, which {tmp_path}/checkpoint-3 holds; continue with --resume"
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
    assert flash("report", tmp_path).exit_code == 0
    assert "not measured yet" in (tmp_path / "report.html").read_text()
    result = flash("train", "--resume", "--out", tmp_path, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert "3 done of 3" in result.output
    assert "this model" in result.output


def test_more_steps_take_up_the_longer_schedule(text, tmp_path):
    """Behind the warmup of 20 steps."""
    sizes = TINY.replace("--steps 4", "--steps 22")
    assert flash("train", text, "--out", tmp_path / "short", *sizes.split()).exit_code == 0
    result = flash("train", "--resume", "--out", tmp_path / "short", "--steps", 24)
    assert result.exit_code == 0, result.output
    assert "22 done of 24" in result.output
    assert (
        flash("train", text, "--out", tmp_path / "long", *TINY.replace("--steps 4", "--steps 24").split()).exit_code
        == 0
    )
    short, long = (
        [log["learning_rate"] for log in read_history(tmp_path / name) if "loss" in log] for name in ("short", "long")
    )
    assert short[:20] == long[:20]
    assert short[20:22] == pytest.approx([1.65e-3, 3e-4])
    assert short[22:] == long[22:]
    assert read_run(tmp_path / "short")[0].steps == 24
    error = one_line(flash("train", "--resume", "--out", tmp_path / "short", "--steps", 5))
    assert error == "error: steps: expected at least the 24 that are done, got 5\n"


def test_a_finished_run_needs_no_corpus(tmp_path, quick_report):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    folder = tmp_path / "run"
    assert flash("train", text, "--out", folder, *TINY.split()).exit_code == 0
    text.unlink()
    bits = [log["eval_bits_per_byte"] for log in read_history(folder) if "eval_loss" in log][-1]
    assert f"{bits:.3f}" in flash("report", folder).output
    written = (folder / "report.html").read_text()
    assert "quick" in written
    assert "1 files, 2,508 bytes to train on" in written
    assert flash("generate", folder, "--max-bytes", 3).exit_code == 0
    error = one_line(flash("train", "--resume", "--out", folder))
    assert error == f"error: paths: expected files or folders, got {text}, which does not exist\n"
    text.write_text("another text\n" * 200)
    assert one_line(flash("train", "--resume", "--out", folder)).startswith("error: paths: expected the bytes that")


def test_a_run_among_its_texts_goes_on(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    folder = tmp_path / "runs" / "one"
    assert flash("train", tmp_path, "--out", folder, *TINY.split()).exit_code == 0
    result = flash("train", "--resume", "--out", folder, "--steps", 5)
    assert result.exit_code == 0, result.output


def test_any_tokenizer(text, tmp_path, quick_report):
    """It stays with the run, and losses are told in bits per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "run"
    result = flash(
        "train", text, "--out", folder, *TINY.split(), "--seq-len", 16, "--tokenizer", tmp_path / "tokenizer"
    )
    assert result.exit_code == 0, result.output
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    facts, model = read_run(folder)[1], load_model(latest_checkpoint(folder))
    assert facts.train_tokens < facts.train_bytes / 3
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    logged = [log for log in read_history(folder) if "eval_loss" in log][-1]
    bits = logged["eval_loss"] / 0.6931471805599453 * facts.held_out_tokens / facts.held_out_bytes
    assert logged["eval_bits_per_byte"] == pytest.approx(bits)
    assert flash("generate", folder, "--prompt", "the quick", "--max-tokens", 3).stdout.startswith("the quick")
    assert flash("train", "--resume", "--out", folder, "--steps", 5).exit_code == 0
    assert flash("report", folder).exit_code == 0
    assert one_line(flash("train", text, "--out", tmp_path / "other", "--tokenizer", tmp_path)).startswith(
        "error: tokenizer"
    )


def test_no_module_of_one_system_is_imported():
    for path in Path(flash_delta.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {"fcntl", "msvcrt", "resource", "winreg"} & set(names), path
