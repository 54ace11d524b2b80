"""Training: the text and its split, batches, runs that resume, generation, and the report."""

import base64
import copy
import json
import re
from unittest.mock import Mock

import pytest
import torch

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import saving
from flash_delta.training.checkpoint import latest_checkpoint
from flash_delta.training.config import TrainConfig
from flash_delta.training.corpus import Corpus, evaluation_windows, order0_entropy, training_batch
from flash_delta.training.figures import smoothed
from flash_delta.training.generate import generate_bytes, generate_text
from flash_delta.training.probe import probe
from flash_delta.training.report import write_report
from flash_delta.training.run import Run
from flash_delta.training.trainer import Trainer

CONFIG = TrainConfig(steps=4, batch_size=2, seq_len=32, eval_every=2, eval_windows=3, checkpoint_every=2)


def tiny_model() -> FlashDeltaForCausalLM:
    torch.manual_seed(0)
    mixers = ["gdn", "kda", "attention"]
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_attention_heads": 2}
    return FlashDeltaForCausalLM(FlashDeltaConfig(vocab_size=256, num_hidden_layers=3, mixers=mixers, **sizes))


def whole_text(corpus: Corpus) -> bytes:
    return torch.cat([corpus.train, corpus.held_out]).numpy().tobytes()


@pytest.fixture
def texts(tmp_path):
    """A folder of 40 different text files, and things that are not text."""
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for i in range(40):
        (folder / ("inner" if i % 2 else ".") / f"{i}.txt").write_text(f"{i} the quick brown fox é {i}\n" * 5)
    (folder / "binary.bin").write_bytes(b"a\0b")
    (folder / "latin1.txt").write_bytes("é".encode("latin1"))
    (folder / "copy.txt").write_bytes((folder / "0.txt").read_bytes())
    (folder / "empty.txt").touch()
    (folder / ".hidden" / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def corpus(texts):
    return Corpus.read([texts])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trainer:
    """A short run on one repetitive file."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    config = TrainConfig(steps=30, batch_size=4, seq_len=48, learning_rate=1e-2, eval_every=15, checkpoint_every=15)
    trainer = Trainer.start(root / "run", tiny_model(), Corpus.read([root / "text.txt"]), config)
    list(trainer.run())
    return trainer


def test_corpus_reads_every_text_once_and_the_same_wherever_it_lies(texts, corpus, tmp_path):
    assert Corpus.read([texts.rename(tmp_path / "moved")]).digest == corpus.digest
    text = whole_text(corpus)
    assert (corpus.files, corpus.skipped) == (40, 4)
    assert all(text.count(f"\n{i} the quick".encode()) >= 4 for i in range(40))
    assert b"secret" not in text


def test_corpus_split_holds_out_whole_files(corpus):
    train, held_out = (set(part.numpy().tobytes().decode().splitlines()) for part in (corpus.train, corpus.held_out))
    assert train.isdisjoint(held_out)
    assert 0.02 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) <= 0.05


def test_corpus_of_one_file_holds_out_its_end(tmp_path):
    (tmp_path / "book.txt").write_bytes(bytes(range(65, 85)) * 10)
    corpus = Corpus.read([tmp_path / "book.txt"])
    assert whole_text(corpus) == (tmp_path / "book.txt").read_bytes()
    assert len(corpus.held_out) == 10


def test_default_corpus_is_the_standard_library():
    text = whole_text(Corpus.read())
    assert b"class OrderedDict(dict):" in text
    assert b"class PreTrainedModel(" not in text
    assert len(text) > 5_000_000


def test_corpus_errors_say_what_was_wrong(tmp_path):
    (tmp_path / "binary.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match="paths: expected at least one UTF-8 text file, got 1 other files in"):
        Corpus.read([tmp_path])
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="seq_len: expected at most the 0 bytes of held-out text, got 32"):
        Trainer.start(tmp_path / "run", tiny_model(), Corpus.read([tmp_path]), CONFIG)


def test_order0_entropy_by_hand():
    assert order0_entropy(torch.tensor(list(b"aabc"), dtype=torch.uint8)) == pytest.approx(1.5)
    assert order0_entropy(torch.zeros(9, dtype=torch.uint8)) == 0
    assert order0_entropy(torch.arange(256, dtype=torch.uint8)) == pytest.approx(8)


def test_batches_depend_on_seed_and_step_alone(corpus):
    def batch(seed, step):
        return training_batch(corpus.train, 4, 16, seed=seed, step=step)

    assert torch.equal(batch(1, 2), batch(1, 2))
    assert not torch.equal(batch(1, 2), batch(1, 3))
    assert not torch.equal(batch(1, 2), batch(2, 2))
    text = corpus.train.numpy().tobytes()
    assert all(bytes(row.tolist()) in text for row in batch(0, 0))


def test_evaluation_windows_cover_the_text_without_overlap():
    text = torch.arange(100, dtype=torch.uint8)
    windows = evaluation_windows(text, 9, 10)
    assert (windows[0, 0], windows[-1, -1]) == (0, 99)
    assert len(windows.unique()) == windows.numel() == 90
    assert len(evaluation_windows(text, 50, 10)) == 10


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("seq_len", 1), ("learning_rate", 0.0), ("seed", -1)])
def test_config_refuses(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value}"):
        TrainConfig(**{name: value})


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    assert [config.learning_rate_at(step) for step in (0, 9, 10, 55, 100)] == pytest.approx([0.1, 1, 1, 0.55, 0.1])


def test_weight_decay_is_for_matrices(corpus, tmp_path):
    groups = Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).optimizer.param_groups
    spared = {name for group in groups if group["weight_decay"] == 0 for name in group["param_names"]}
    assert all(any(part in name for part in ("A_log", "dt_bias", "norm", "bias")) for name in spared)
    assert {"A_log", "dt_bias"} <= {name.rpartition(".")[2] for name in spared}


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(corpus, tmp_path):
    whole = Trainer.start(tmp_path / "whole", tiny_model(), corpus, CONFIG)
    records = list(whole.run())
    cut = Trainer.start(tmp_path / "cut", tiny_model(), corpus, CONFIG).run()
    for _ in range(3):  # the checkpoint is of step 2: step 3 is lost and done again
        next(cut)
    cut.close()
    resumed = Trainer.resume(tmp_path / "cut")
    assert resumed.step == 2
    assert [record.bits_per_byte for record in resumed.run()] == [record.bits_per_byte for record in records[2:]]
    for (name, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert resumed.records[-1].held_out_bits_per_byte == records[-1].held_out_bits_per_byte


def test_a_run_killed_while_saving_keeps_the_checkpoint_before(corpus, tmp_path, monkeypatch):
    run = Trainer.start(tmp_path, tiny_model(), corpus, CONFIG).run()
    next(run), next(run)
    before = latest_checkpoint(tmp_path)
    monkeypatch.setattr(saving, "save_file", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert latest_checkpoint(tmp_path) == before
    monkeypatch.undo()
    list(Trainer.resume(tmp_path).run())
    assert sorted(path.name for path in before.parent.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_folder_with_a_run_is_not_overwritten(trained):
    with pytest.raises(ValueError, match=r"folder: .*step-00000030: resume it"):
        Trainer.start(trained.folder, tiny_model(), trained.corpus, CONFIG)


def test_resume_refuses_other_text(corpus, texts, tmp_path):
    list(Trainer.start(tmp_path / "run", tiny_model(), corpus, CONFIG).run())
    (texts / "new.txt").write_text("something else")
    with pytest.raises(ValueError, match="corpus: expected the bytes that"):
        Trainer.resume(tmp_path / "run")


def test_training_learns_and_writes_its_history(trained):
    first, last = trained.records[0], trained.records[-1]
    assert first.bits_per_byte > 7
    assert last.held_out_bits_per_byte < 3 < order0_entropy(trained.corpus.held_out)
    history = json.loads((trained.folder / "history.json").read_text())
    assert [record["step"] for record in history] == list(range(1, 31))
    assert (trained.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_generation_streams_what_generate_writes(trained):
    prompt = b"the quick"
    expected = trained.model.generate(torch.tensor([list(prompt)]), max_new_tokens=20, do_sample=False)
    assert list(generate_bytes(trained.model, prompt, 20, temperature=0)) == expected[0, len(prompt) :].tolist()
    text = "".join(generate_text(trained.model, "the quick", 20, temperature=0))
    assert text == bytes(expected[0, len(prompt) :].tolist()).decode(errors="replace")


def test_sampling_depends_on_the_seed_and_top_1_is_greedy(trained):
    def sample(**options):
        return list(generate_bytes(trained.model, b"fox", 12, **options))

    assert sample(seed=1, temperature=2.0) == sample(seed=1, temperature=2.0) != sample(seed=2, temperature=2.0)
    assert sample(top_k=1) == sample(temperature=0)


def test_generated_bytes_become_whole_characters(trained, monkeypatch):
    monkeypatch.setattr("flash_delta.training.generate.generate_bytes", lambda *_, **__: iter("aé€".encode() + b"\xe2"))
    assert list(generate_text(trained.model, "x", 7)) == ["a", "é", "€", "\ufffd"]


@pytest.mark.parametrize("wrong", [{"prompt": b""}, {"max_bytes": -1}, {"temperature": -1.0}, {"top_k": 0}])
def test_generation_refuses(trained, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected (at least|0, or)"):
        next(generate_bytes(trained.model, **{"prompt": b"a", "max_bytes": 1} | wrong))


def test_probe_measures_half_lives_and_states(trained):
    model = copy.deepcopy(trained.model)
    layer = model.model.layers[0].mixer
    with torch.no_grad():  # a gate that does not look at its token: g = -exp(A_log) softplus(dt_bias) = -ln 2 / 5
        layer.a_proj.weight.zero_()
        layer.A_log.fill_(torch.tensor(0.2).log())
        layer.dt_bias.zero_()
    measured = probe(model, trained.corpus.held_out)
    gdn, kda = measured.decays
    torch.testing.assert_close(gdn.half_life, torch.full((2,), 5.0))
    torch.testing.assert_close(gdn.token_range, torch.full((2, 2), 5.0))
    assert (kda.layer, kda.half_life.shape) == (1, (2, 16))
    assert {layer: state.shape for layer, state in measured.states.items()} == {0: (2, 16, 16), 1: (2, 16, 16)}


def test_report_is_one_page_with_its_pictures(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("flash_delta.training.report.generate_text", lambda *_, **__: iter(["<script>x</script>"]))
    write_report(Run.read(trained.folder), trained.model, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"https?://|<script|<link", page)
    pictures = re.findall(r'(?:src|srcset)="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == 10  # loss, time, two kinds of decay, states; each light and dark
    assert all(b"</svg>" in base64.b64decode(picture) for picture in pictures)
    assert f"{trained.model.num_parameters():,}" in page
    assert all(words in page for words in ("bits per byte", "gdn, kda, attention", "half-life", "&lt;script&gt;x"))
    assert all(words in page for words in ("median time per step", "colours clip", "Python trained it"))


def test_a_curve_is_smoothed_over_a_part_of_its_steps():
    assert smoothed([3.0, 5.0])[1].tolist() == [3.0, 5.0]
    span, means = smoothed([0.0, 1.0] * 45)
    assert span == 3
    assert means[:2] == pytest.approx([1 / 3, 2 / 3])
    assert len(means) == 90 - 3 + 1
