"""lm-evaluation-harness on our models and on Qwen3-Next: its numbers are those of the model's own logits."""

import json
import math
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import tiny_transformers
import torch

if find_spec("lm_eval") is None:
    pytest.skip("it needs lm-eval", allow_module_level=True)

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from flash_delta.integrations.transformers import enable
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval's
BYTES = byte_tokenizer()
END = BYTES.eos_token_id
# Prompts of very different lengths, so that most of a batch is padding.
ROWS = [
    {"code": "def f(x):\n    return", "lines": [" x", " class"], "best": 0},
    {"code": "i", "lines": ["f x:", "f]"], "best": 1},
    {"code": "for name, value in sorted(values.items()):\n    print(name, value" * 2, "lines": [")", "]:"], "best": 0},
]
NEW = 12  # tokens that generate_until writes at most
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{code}}",
        "doc_to_choice": "{{lines}}",
        "doc_to_target": "{{best}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{code}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{code}}",
        "doc_to_target": "{{lines[best]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
MODELS = {
    "gdn": {"mixer": "gdn"},
    "hybrid": {"mixers": ["gdn", "attention", "kda"]},
    "products": {"mixers": ["gdp", "gdn2", "gdp"]},
}
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))  # JSON is YAML
    return TaskManager(include_path=str(folder))


@pytest.fixture(autouse=True)
def own_caches(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def build(kind):
    torch.manual_seed(0)
    if kind == "qwen3_next":
        return tiny_transformers.build(kind, vocab_size=256, pad_token_id=None, bos_token_id=None, eos_token_id=END)
    config = FlashDeltaConfig(**SIZES, num_attention_heads=2, initializer_range=0.2, eos_token_id=END, **MODELS[kind])
    return FlashDeltaForCausalLM(config).eval()


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def score(model, before, after):
    """The log probability of the tokens ``after``."""
    found = logits(model, before + after).log_softmax(-1)[len(before) - 1 : -1]
    return float(found.gather(1, torch.tensor(after)[:, None]).sum())


def greedy(model, ids):
    """Most likely tokens up to a newline or the end, each from all tokens before it."""
    new = []
    while len(new) < NEW and (not new or new[-1] not in (10, END)):
        new.append(int(logits(model, ids + new)[-1].argmax()))
    return BYTES.decode(new, skip_special_tokens=True).split("\n")[0]


def encode(text):
    return list(text.encode())


def evaluate(model, tasks, batch_size):
    """By task, what lm-eval found, and the responses of the model."""
    lm = model if isinstance(model, dict) else HFLM(pretrained=model, tokenizer=BYTES, batch_size=batch_size)
    kind = {"model": "hf", "model_args": model, "device": "cpu"} if isinstance(model, dict) else {"model": lm}
    found = lm_eval.simple_evaluate(
        **kind, tasks=list(TASKS), task_manager=tasks, batch_size=batch_size, bootstrap_iters=0
    )
    responses = {}
    for name in TASKS:
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        responses[name] = [[response[0] for response in sample["resps"]] for sample in samples]
    return found["results"], responses


def require_own_logits(model, results, responses):
    likely = [[score(model, encode(row["code"]), encode(line)) for line in row["lines"]] for row in ROWS]
    for mine, theirs in zip(likely, responses["choice"], strict=True):
        assert [value for value, _ in theirs] == pytest.approx(mine, rel=1e-5)
    right = [likely[i].index(max(likely[i])) == row["best"] for i, row in enumerate(ROWS)]
    assert results["choice"]["acc,none"] == pytest.approx(sum(right) / len(ROWS))
    texts = [encode(row["code"]) for row in ROWS]
    nats = -sum(score(model, [END], text) for text in texts)
    assert results["text"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-5)
    assert responses["answer"] == [[greedy(model, text)] for text in texts]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_folder_of_ours(kind, batch_size, tasks, tmp_path):
    """lm-eval loads it by its path alone. A padded row has the numbers that it has alone."""
    model = build(kind)
    model.save_pretrained(tmp_path)
    BYTES.save_pretrained(tmp_path)
    require_own_logits(model, *evaluate({"pretrained": str(tmp_path)}, tasks, batch_size))


@pytest.mark.parametrize("enabled", [False, True])
def test_qwen3_next(enabled, tasks):
    """Under `enable`, too. The numbers to compare with are always those of transformers' own code."""
    model = build("qwen3_next")
    with enable() if enabled else nullcontext():
        found = evaluate(model, tasks, 3)
    require_own_logits(model, *found)


def test_windows_of_a_longer_text(tasks):
    """With a `max_length`, a text is read in windows, each after the last token of the one before."""
    model = build("hybrid")
    lm = HFLM(pretrained=model, tokenizer=BYTES, batch_size=2, max_length=16)
    found = lm_eval.simple_evaluate(model=lm, tasks=["text"], task_manager=tasks, bootstrap_iters=0)
    nats = total = 0
    for row in ROWS:
        ids = [END, *encode(row["code"])]
        for start in range(0, len(ids) - 1, 16):
            stop = min(start + 16, len(ids) - 1)
            begin = max(0, stop - 16) if start else 0  # the last window is filled up with context
            nats -= score(model, ids[begin : start + 1], ids[start + 1 : stop + 1])
        total += len(ids) - 1
    assert found["results"]["text"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / total, rel=1e-5)
