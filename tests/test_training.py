"""Training: the text and its split, windows, runs that resume, generation, and the report."""

import base64
import copy
import math
import re
import time
from dataclasses import replace
from functools import partialmethod
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.report import Run, page, probe, write_report
from flash_delta.report.figures import smoothed
from flash_delta.training import Corpus, Layout, RunTrainer, Settings, byte_tokenizer, generate_text, order0_entropy
from flash_delta.training.batches import IGNORED, Collator, Windows
from flash_delta.training.corpus import evaluation_starts, training_starts
from flash_delta.training.flops import flops_per_token, share_of_peak

SETTINGS = Settings(steps=4, batch_size=2, seq_len=32, checkpoint_every=2)
ALONE, BYTES = Layout(), byte_tokenizer()


def tiny_model() -> FlashDeltaForCausalLM:
    torch.manual_seed(0)
    mixers = ["gdn", "kda", "attention"]
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_attention_heads": 2}
    return FlashDeltaForCausalLM(FlashDeltaConfig(vocab_size=256, num_hidden_layers=3, mixers=mixers, **sizes))


def make(folder, corpus, layout=ALONE, model=None, stop=lambda: 0, **changes) -> RunTrainer:
    settings = replace(SETTINGS, **changes)
    return RunTrainer(folder, model or tiny_model(), BYTES, corpus, settings, layout, stop, use_cpu=True)


def logs(trainer, name="bits_per_byte") -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


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
def trained(tmp_path_factory) -> RunTrainer:
    """A short run on one repetitive file."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    text = Corpus.read([root / "text.txt"])
    trainer = make(root / "run", text, steps=30, batch_size=4, seq_len=48, lr=1e-2, checkpoint_every=15)
    trainer.train()
    trainer.save_model()
    return trainer


def test_corpus_reads_every_text_once_and_the_same_wherever_it_lies(texts, corpus, tmp_path):
    assert Corpus.read([texts.rename(tmp_path / "moved")]).summary.digest == corpus.summary.digest
    text = whole_text(corpus)
    assert (corpus.summary.files, corpus.summary.skipped) == (40, 4)
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
    (tmp_path / "short.txt").write_text("short " * 10)
    with pytest.raises(ValueError, match="seq_len: expected at most the 3 tokens of held-out text, got 32"):
        make(tmp_path / "run", Corpus.read([tmp_path]))


def test_tokens_of_the_byte_tokenizer_are_bytes(corpus):
    text = whole_text(corpus).decode() + "\0\t €"
    assert BYTES(text).input_ids == list(text.encode())
    assert BYTES.decode(list(text.encode())) == text
    assert len(BYTES) == 256


def test_the_end_of_a_text_is_a_byte_that_no_text_has(tmp_path):
    """Every character keeps its bytes, also those whose signs the tokenizer uses within, and a text that spells the
    end."""
    BYTES.save_pretrained(tmp_path)
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 97)])) + "a<|endoftext|>b"
    for tokenizer in (BYTES, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.eos_token_id == 255
        assert tokenizer(text).input_ids == list(text.encode())
        assert 255 not in text.encode()


def test_files_keep_their_begins_in_the_tokens_of_a_tokenizer(texts, corpus):
    """The tokens of the byte tokenizer are those of no tokenizer."""
    same = Corpus.read([texts], BYTES)
    assert same.summary == corpus.summary
    for name in ("train", "held_out", "train_begins", "held_out_begins"):
        assert torch.equal(getattr(same, name), getattr(corpus, name)), name
    assert int(corpus.train_begins.sum() + corpus.held_out_begins.sum()) == corpus.summary.files


def test_order0_entropy_by_hand():
    assert order0_entropy(b"aabc") == pytest.approx(1.5)
    assert order0_entropy(bytes(9)) == 0
    assert order0_entropy(bytes(range(256))) == pytest.approx(8)


def test_batches_depend_on_seed_and_step_alone():
    def starts(seed, step):
        return training_starts(1000, 4, 16, seed=seed, step=step).tolist()

    assert starts(1, 2) == starts(1, 2)
    assert starts(1, 2) != starts(1, 3)
    assert starts(1, 2) != starts(2, 2)


def test_evaluation_windows_cover_the_text_without_overlap():
    starts = evaluation_starts(100, 9, 10).tolist()
    assert (starts[0], starts[-1]) == (0, 90)
    assert all(after - before >= 10 for before, after in pairwise(starts))
    assert len(evaluation_starts(100, 50, 10)) == 10


def test_ranks_that_share_tokens_get_the_same_windows():
    windows = Windows(torch.arange(40), None, 4, lambda n: 4 * n, count=8, rows=2, sharers=2)
    taken = [windows[n]["tokens"][0].item() // 4 for n in range(len(windows))]
    assert taken == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]


def test_documents_in_a_batch():
    begins = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1])
    starts = [0, 4, None]
    windows = Windows(torch.arange(1, 9), begins, 4, starts.__getitem__, count=3, rows=3)
    batch = Collator(packed=True)([windows[n] for n in range(3)])
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 7, 8, 10, 12]
    no = IGNORED
    assert batch["labels"].tolist() == [[no, 2, no, 4, no, 6, 7, no, no, no, no, no, no]]
    assert Collator(packed=False)([windows[0]])["input_ids"].tolist() == [[1, 2, 3, 4]]


def test_packed_windows_are_documents_of_their_own(corpus, tmp_path):
    """The first loss is that of every document's piece alone."""
    trainer = make(tmp_path, corpus, packed=True, seq_len=179, steps=1)
    bounds = [*corpus.train_begins.nonzero()[:, 0].tolist(), len(corpus.train)]
    starts = training_starts(len(corpus.train), 2, 179, seed=0, step=0).tolist()
    pieces = [(max(start, a), min(start + 179, b)) for start in starts for a, b in pairwise(bounds)]
    pieces = [corpus.train[a:b].long()[None] for a, b in pieces if b - a > 1]
    assert len(pieces) > len(starts)
    with torch.no_grad():
        nats = sum(trainer.model(piece, labels=piece).loss.item() * (piece.shape[1] - 1) for piece in pieces)
    bits = nats / sum(piece.shape[1] - 1 for piece in pieces) / math.log(2)
    trainer.train()
    assert logs(trainer) == [pytest.approx(bits, rel=1e-5)]


def test_accumulated_passes_equal_one(corpus, tmp_path):
    """Documents have unequal numbers of targets, and a mean over passes would be another one than over tokens."""
    one, four = (
        make(tmp_path, corpus, Layout(accumulate=n), tiny_model().double(), packed=True, batch_size=4, seq_len=179)
        for n in (1, 4)
    )
    one.train(), four.train()
    for name in ("loss", "grad_norm", "eval_loss", "eval_bits_per_byte"):
        assert logs(four, name) == pytest.approx(logs(one, name), rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.0), ("lr", float("nan")), ("dtype", "half")])
def test_settings_refuse(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got '?{value}"):
        Settings(**{name: value})


def test_learning_rate_warms_up_and_falls_to_a_tenth(trained):
    rates = logs(trained, "learning_rate")
    assert rates[:20] == pytest.approx([1e-2 * (step + 1) / 20 for step in range(20)])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert rates[-1] == pytest.approx(1e-3)


def test_weight_decay_is_for_matrices(trained):
    decayed, others = trained.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() > 1 for p in decayed["params"])
    assert {id(layer.mixer.A_log) for layer in trained.model.model.layers[:2]} <= {id(p) for p in others["params"]}


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(corpus, tmp_path):
    whole = make(tmp_path / "run", corpus)
    whole.train()
    resumed = make(tmp_path / "run", corpus)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name in ("bits_per_byte", "grad_norm", "learning_rate", "eval_bits_per_byte"):
        assert logs(resumed, name) == logs(whole, name)
    for (name, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_compiled_blocks_compute_the_same(corpus, tmp_path, monkeypatch):
    compile_in = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_in)
    losses = []
    for compiled in (False, True):
        trainer = make(tmp_path / str(compiled), corpus, layout=Layout(compile=compiled), steps=3, seq_len=32)
        assert [block._compiled_call_impl is not None for block in trainer.model.model.layers] == [compiled] * 3
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_kinds_of_blocks_are_compiled_and_not_more(corpus, tmp_path, monkeypatch, packed):
    """In training and in evaluation, for any number of documents in a window. What a tracer has found is not compiled
    here: the test above does so."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=counter))
    torch._dynamo.reset()
    make(tmp_path, corpus, layout=Layout(compile=True), steps=8, seq_len=96, packed=packed).train()
    assert (
        6 <= counter.frame_count <= 6 * (3 if packed else 1) < torch._dynamo.config.recompile_limit
    )  # three kinds, twice; bounds of one, two, many numbers


def test_compiled_blocks_cannot_be_split(corpus, tmp_path):
    with pytest.raises(ValueError, match="compile: expected False with context_parallel > 1"):
        make(tmp_path, corpus, layout=Layout(context_parallel=2, compile=True))


def test_a_whole_row_has_no_heads_and_tails(corpus, tmp_path):
    with pytest.raises(ValueError, match="head_tail: expected False with context_parallel = 1"):
        make(tmp_path, corpus, layout=Layout(head_tail=True))


def test_a_step_takes_the_time_of_its_batch(corpus, tmp_path, monkeypatch):
    """And that of its device, for which ranks wait when they tell each other whether to stop. Evaluations and
    checkpoints are no part of it."""
    trainer = make(tmp_path, corpus, steps=4, batch_size=2, seq_len=32, checkpoint_every=2)
    trainer.share = 1e-6  # as if this device had a known peak

    def slower(thing, name, seconds):
        call = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *args, **kwargs: time.sleep(seconds) or call(*args, **kwargs))

    slower(Collator, "__call__", 0.2)
    slower(trainer.accelerator, "gather", 0.2)
    for name in ("evaluate", "_save_checkpoint"):
        slower(trainer, name, 2)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["mfu"] == pytest.approx(1e-6 * log["tokens_per_second"]) for log in steps)
    seconds = [64 / log["tokens_per_second"] for log in steps]
    assert all(0.4 <= s < 2 for s in seconds[1:-1])  # batches are made a step ahead


def test_arithmetic_of_a_token():
    """Beside PyTorch's own count of a forward pass: a third of it, and of attention the half that is not masked."""
    config = FlashDeltaConfig(
        vocab_size=96, hidden_size=128, num_hidden_layers=2, mixers=["attention"] * 2, num_attention_heads=4
    )
    model, T = FlashDeltaForCausalLM(config), 48
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, T, dtype=torch.long), use_cache=False)
    masked = 2 * 2 * 128 * T * T  # in two layers: q k and p v have 2 H D T products each, for T tokens; half of them
    assert flops_per_token(model, T) * T / 3 == pytest.approx(counter.get_total_flops() - masked, rel=0.01)
    assert share_of_peak(model, T, torch.device("cpu"), 1) is None


def test_share_of_peak(monkeypatch):
    model, device = tiny_model(), torch.device("cuda", 0)
    peaks = dict.fromkeys(("NVIDIA H200", "NVIDIA H100 80GB HBM3"), 989.4e12)
    peaks |= dict.fromkeys(("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb"))
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found = share_of_peak(model, 32, device, 2)
        assert found == (None if peak is None else pytest.approx(flops_per_token(model, 32) / 2 / peak))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert share_of_peak(torch.nn.Linear(2, 2), 32, device, 1) is None


def test_training_learns_and_from_pretrained_reads_the_run(trained):
    assert logs(trained)[0] > 7
    assert len(logs(trained)) == 30
    assert logs(trained, "eval_bits_per_byte")[-1] < 3 < trained.corpus.entropy
    folder = trained.args.output_dir
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder)("né").input_ids == list("né".encode())
    made = pipeline("text-generation", folder, device="cpu")("the quick", max_new_tokens=9, do_sample=False)
    assert made[0]["generated_text"] == "the quick" + generate_text(model, BYTES, "the quick", 9, temperature=0)


def test_sampling_depends_on_the_seed_and_top_1_is_greedy(trained):
    def sample(**options):
        return generate_text(trained.model, BYTES, "fox", 12, **options)

    assert sample(seed=1, temperature=2.0) == sample(seed=1, temperature=2.0) != sample(seed=2, temperature=2.0)
    assert sample(top_k=1) == sample(temperature=0)


@pytest.mark.parametrize("wrong", [{"prompt": ""}, {"temperature": -1.0}])
def test_generation_refuses(trained, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected (at least|0, or)"):
        generate_text(trained.model, BYTES, **{"prompt": "a", "max_tokens": 1} | wrong)


def test_probe_measures_half_lives_and_states(trained):
    model = copy.deepcopy(trained.model)
    layer = model.model.layers[0].mixer
    with torch.no_grad():  # a gate that does not look at its token: g = -exp(A_log) softplus(dt_bias) = -ln 2 / 5
        layer.a_proj.weight.zero_()
        layer.A_log.fill_(torch.tensor(0.2).log())
        layer.dt_bias.zero_()
    measured = probe(model, torch.tensor(list(trained.corpus.excerpt.encode())))
    gdn, kda = measured.decays
    torch.testing.assert_close(gdn.half_life, torch.full((2,), 5.0))
    torch.testing.assert_close(gdn.token_range, torch.full((2, 2), 5.0))
    assert (kda.layer, kda.half_life.shape) == (1, (2, 16))
    assert {layer: state.shape for layer, state in measured.states.items()} == {0: (2, 16, 16), 1: (2, 16, 16)}


def test_report_is_one_page_with_its_pictures(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "generate_text", lambda *_, **__: "<script>x</script>")
    write_report(Run.read(trained.args.output_dir), trained.model, BYTES, tmp_path / "report.html", "flash-delta train")
    written = (tmp_path / "report.html").read_text()
    assert not re.findall(r"https?://|<script|<link", written)
    pictures = re.findall(r'(?:src|srcset)="data:image/svg\+xml;base64,([^"]+)"', written)
    assert len(pictures) == 10  # loss, time, two kinds of decay, states; each light and dark
    assert all(b"</svg>" in base64.b64decode(picture) for picture in pictures)
    assert f"{trained.model.num_parameters():,}" in written
    assert f"{logs(trained, 'eval_bits_per_byte')[-1]:.3f}" in written
    assert all(words in written for words in ("bits per byte", "gdn, kda, attention", "half-life", "&lt;script&gt;x"))
    assert all(words in written for words in ("median time per step", "colours clip", "<pre>flash-delta train</pre>"))


def test_a_curve_is_smoothed_over_a_part_of_its_steps():
    assert smoothed([3.0, 5.0])[1].tolist() == [3.0, 5.0]
    span, means = smoothed([0.0, 1.0] * 45)
    assert span == 3
    assert means[:2] == pytest.approx([1 / 3, 2 / 3])
    assert len(means) == 90 - 3 + 1
