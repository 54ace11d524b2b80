"""The model card of a run says what the run was, and its code loads the model."""

import re

import pytest
from test_cli import TINY, flash

from flash_delta.training import load_model, read_history, read_run, require_checkpoint


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "a secret place" / "text.txt"
    file.parent.mkdir()
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return file


def rows(card):
    return dict(re.findall(r"^\| (.+?) \| (.*) \|$", card, re.MULTILINE))


def test_a_card_has_the_facts_of_its_run(text, tmp_path, monkeypatch):
    run = tmp_path / "fox"
    assert flash("train", text, "--out", run, *TINY.split(), "--packed").exit_code == 0
    card = (run / "README.md").read_text()
    settings, corpus = read_run(run)
    found = rows(card)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"\n# fox\n\nA language model of {load_model(require_checkpoint(run)).num_parameters():,} param" in card
    assert (found["steps done"], found["steps"], found["packed"]) == (str(settings.steps), str(settings.steps), "True")
    assert (found["lr"], found["mixers"]) == (str(settings.lr), settings.mixers)
    assert found["bytes to train on"] == f"{corpus.train_bytes:,}"
    assert found["SHA-256"] == f"`{corpus.digest}`"
    bits = [record["eval_bits_per_byte"] for record in read_history(run) if "eval_bits_per_byte" in record][-1]
    assert found[f"this model after step {settings.steps}"] == f"{bits:.3f}"
    assert "secret" not in card
    assert "source" not in found
    monkeypatch.chdir(run)
    names = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert type(names["model"]).__name__ == "FlashDeltaForCausalLM"
    assert names["tokenizer"]("fox").input_ids == list(b"fox")


def test_a_resumed_run_has_a_new_card(text, tmp_path):
    run = tmp_path / "fox"
    flash("train", text, "--out", run, *TINY.split())
    steps = read_run(run)[0].steps
    assert flash("train", "--resume", "--out", run, "--steps", steps + 1).exit_code == 0
    found = rows((run / "README.md").read_text())
    assert found["steps done"] == found["steps"] == str(steps + 1)
    assert f"this model after step {steps + 1}" in found


def test_a_page_of_another_kind_stays(text, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    result = flash("train", text, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 2
    assert "error: out: expected a folder without a README.md of another kind than a run's card, got " in result.stderr
    assert (tmp_path / "README.md").read_text() == "# My project\n"
