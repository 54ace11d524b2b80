"""The model card of a run says what the run was, and its code loads the model."""

import re
from types import SimpleNamespace

import pytest
import transformers.trainer
from test_cli import TINY, flash
from test_training import make

from flash_delta.training import Corpus, load_model, read_history, read_run, require_checkpoint


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


def test_the_card_that_is_uploaded_is_the_run_s_own(tmp_path, monkeypatch):
    """`push_to_hub` of transformers asks the trainer for a card, under the name of the repository."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    run = make(tmp_path / "run", Corpus.read([tmp_path / "text.txt"]), steps=2, seq_len=32)
    run.train()
    run.hub_model_id, uploaded = "me/fox", []
    hub = SimpleNamespace(upload_folder=lambda **folder: uploaded.append(folder["folder_path"]))
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub, raising=False)
    monkeypatch.setattr(transformers.trainer, "upload_folder", hub.upload_folder, raising=False)
    with monkeypatch.context() as other_rank:
        other_rank.setattr(run, "is_world_process_zero", lambda: False)
        run.create_model_card()
    assert not (tmp_path / "run" / "README.md").exists()
    run.push_to_hub(model_name="fox")
    card = (tmp_path / "run" / "README.md").read_text()
    assert [str(folder) for folder in uploaded] == [str(tmp_path / "run")]
    assert "\n# fox\n\nA language model of " in card
    assert rows(card)["steps done"] == "2"
    with pytest.raises(ValueError, match="license: expected nothing, as a run's card has facts of the run"):
        run.push_to_hub(license="mit")


def test_a_page_of_another_kind_stays(text, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    result = flash("train", text, "--out", tmp_path, *TINY.split())
    assert result.exit_code == 2
    assert "error: out: expected a folder without a README.md of another kind than a run's card, got " in result.stderr
    assert (tmp_path / "README.md").read_text() == "# My project\n"
