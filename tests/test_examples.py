"""The examples do what they say."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from tiny_model import build
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from flash_delta.integrations.transformers import enable

EXAMPLES = Path(__file__).parent.parent / "examples"
# More prompts than slots, and prompts longer than a step.
SMALL = ("--prompts", "9", "--longest", "90", "--max-new-tokens", "8", "--slots", "3", "--step-tokens", "40")
FRESH = ("--hidden-size", "32", "--layers", "2")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    return load("continuous_batching")


def run(example, *options):
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, [*SMALL, *options])


@pytest.mark.parametrize("seed", ["0", "1"])
def test_completions_are_those_of_generate(example, seed):
    out = run(example, *FRESH, "--seed", seed)
    assert out.exit_code == 0, out.output
    assert "9 of 9 completions are what model.generate makes of the prompt alone" in out.output
    assert "9 prompts in " in out.output
    assert "72 written" in out.output


def test_a_trained_model_is_served(example, tmp_path):
    example.fresh_model(32, 2, seed=3).save_pretrained(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").touch()  # Trainer writes it last
    assert "9 of 9 completions" in run(example, "--run", str(tmp_path)).output


def test_what_another_request_left_in_a_slot_would_show(example, monkeypatch):
    """The comparison can fail: here every request goes on from whatever is in its slot."""
    pack = example.Engine.pack

    def all_begun(engine, chosen):
        batch = pack(engine, chosen)
        return replace(batch, begun=torch.ones_like(batch.begun))

    monkeypatch.setattr(example.Engine, "pack", all_begun)
    out = run(example, *FRESH, "--longest", "9")
    assert out.exit_code == 1
    equal = int(re.search(r"(\d+) of 9 completions", out.output)[1])
    assert 3 <= equal < 9  # those that came first


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("hybrid", (4, 16, 1), "model: expected mixers 'gdn' and 'kda' only, got ['gdn', 'attention', 'kda']"),
        ("gdn", (0, 16, 1), "slots: expected at least 1, got 0"),
        ("gdn", (4, 3, 1), "step_tokens: expected at least 4, got 3"),
        ("gdn", (4, 16, 0), "max_new_tokens: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_served(example, kind, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        example.Engine(build(kind), *sizes)


def on_two_ranks(*command):
    """What is printed. On a busy machine a rank may abort when it has printed everything and its process ends
    ("terminate called without an active exception", in torch's threads). So there are three starts, and if all fail,
    all that they said is shown."""
    launch, said = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), []
    for _ in range(3):
        ended = subprocess.run([*launch, *command], capture_output=True, text=True)
        if ended.returncode == 0:
            return ended.stdout
        said.append(ended.stdout + ended.stderr)
    raise AssertionError("\n\n".join(said))


@pytest.mark.parametrize("mixer", ["gdn", "kda"])
def test_a_row_over_two_ranks(mixer):
    sizes = ("--tokens", "301", "--hidden-size", "32", "--heads", "1", "--head-dim", "16", "--repeats", "1")
    out = on_two_ranks(EXAMPLES / "context_parallel.py", "--mixer", mixer, *sizes)
    assert re.search(r"^layer: one rank .* ms, 2 ranks .* ms, efficiency", out, re.MULTILINE), out
    errors = re.findall(r"^(?:layer|op): rank [01], output (\S+) off, gradients up to (\S+)$", out, re.MULTILINE)
    assert len(errors) == 4, out
    assert all(float(error) < 1e-5 for pair in errors for error in pair), out


def test_a_training_loop_on_long_rows(tmp_path, monkeypatch, capsys):
    """One process and two ranks print the same losses. The ranks share the tokens of a row, or else heads. One process
    continues from the checkpoint of two ranks."""
    (tmp_path / "book.txt").write_text("".join(f"{i} bottles of beer on the wall\n" for i in range(400)))
    sizes = ("--tokens", "301", "--layers", "3", "--hidden-size", "32", "--heads", "2", "--head-dim", "16")
    command = [str(EXAMPLES / "long_context.py"), str(tmp_path / "book.txt"), *sizes, "--mixers", "gdn,kda,attention"]
    saved = ("--out", str(tmp_path / "run"), "--checkpoint-every", "2")

    def numbers(out):
        return [float(x) for x in re.findall(r"(\d\.\d{3})(?: bits| |\n)", out)]

    def alone(*more):
        monkeypatch.setattr(sys, "argv", [*command, "--steps", "3", *more])
        load("long_context").main()
        return numbers(capsys.readouterr().out)

    one = alone()
    assert len(one) == 3 + 8
    assert one[2] < one[0]
    assert numbers(on_two_ranks(*command, "--steps", "3")) == pytest.approx(one, abs=2e-3)
    heads = on_two_ranks(*command, "--steps", "2", "--tensor-parallel", "2", *saved)
    assert numbers(heads)[:2] == pytest.approx(one[:2], abs=2e-3)
    assert alone(*saved) == pytest.approx(one[2:], abs=2e-3)
    assert sorted(folder.name for folder in (tmp_path / "run").iterdir()) == ["2", "3"]


def test_layers_of_transformers(monkeypatch):
    """Eight rows for each of PyTorch and ours; a step that is another function fails."""
    layers, app = load("transformers_layers"), typer.Typer()
    app.command()(layers.main)
    sizes = ["--tokens", "70", "--prompts", "1", "--rows", "2", "--repeats", "1", "--width", "16", "--heads", "1"]
    out = CliRunner().invoke(app, sizes)
    assert out.exit_code == 0, out.output
    assert out.output.count(" PyTorch ") == out.output.count(" flash_delta ") == 8
    monkeypatch.setattr(layers, "ANOTHER_FUNCTION", 1e-6)
    out = CliRunner().invoke(app, sizes)
    assert out.exit_code == 1
    assert out.output.count("another function") == 8


@pytest.fixture(scope="module")
def graphs():
    return load("generate_graphs")


def test_generation_without_a_graph(graphs, monkeypatch):
    """The tokens of `generate`, which are not always the same one; a step that stays where it is gives others."""
    app, sizes = typer.Typer(), ["--rows", "2", "--tokens", "5", "--new-tokens", "9", "--hidden-size", "32"]
    app.command()(graphs.main)
    out = CliRunner().invoke(app, sizes)
    assert out.exit_code == 0, out.output
    assert out.output.count("18 of 18 as model.generate's") == 3
    assert "this loop, no graph" in out.output
    monkeypatch.setattr(graphs.Loop, "step", lambda loop: None)
    out = CliRunner().invoke(app, sizes)
    assert out.exit_code == 1, out.output
    assert out.output.count("18 of 18 as model.generate's") == 2
    out = CliRunner().invoke(app, ["--dtype", "int8"])
    assert str(out.exception) == "dtype: expected float32, bfloat16, float16, got 'int8'"


class Recorded(TorchDispatchMode):
    """A CUDA graph on the CPU: the operators of a step on the memory that they had, with no Python in between."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(*map(torch.utils._pytree.tree_leaves, (out, again)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@torch.inference_mode()
def test_a_recorded_step_is_all_of_generation(graphs):
    """The recorded step is right for other prompts and reads no value on the host, as a graph would. The cache stays in
    place."""
    model = graphs.random_model(32, 4)
    prompts = torch.randint(1, 500, (2, 3, 7))
    with enable(model):
        loop = graphs.Loop(model, 3, 32)
        loop.read(prompts[0])
        loop.step()
        kept = {name: t.data_ptr() for name, t in tensors_of(loop)}
        with Recorded() as loop.graph:
            loop.step()
        for prompt in prompts:
            options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
            want = model.generate(prompt, **options)[:, 7:]
            assert len(want.unique()) > 6
            assert torch.equal(loop.generate(prompt, 12), want)
    assert {name: t.data_ptr() for name, t in tensors_of(loop)} == kept
    assert len(kept) == 2 + 3 * 2 + 3  # token and position, two states a layer of linear attention, the other's cache
    names = {function.overloadpacket.__name__ for function, *_ in loop.graph.calls}
    assert not names & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}


def tensors_of(loop):
    yield from (("token", loop.token), ("position", loop.position))
    for number, layer in enumerate(loop.cache.layers):
        states = {
            f"{name}{n}": t
            for name in ("conv_states", "recurrent_states")
            for n, t in vars(layer).get(name, {}).items()
        }
        for name, t in (vars(layer) | states).items():
            if isinstance(t, torch.Tensor):
                yield f"{number}.{name}", t
