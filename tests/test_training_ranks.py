"""Training on many ranks is training on one: gloo on processes of this machine."""

import multiprocessing

import pytest
import torch
import torch.multiprocessing as mp
from training_ranks import (
    MIXERS,
    RUNS,
    assert_gradients_in_bfloat16,
    loss_of_row,
    make,
    results,
    tiny_model,
    work,
)

from flash_delta.training import Layout, latest_checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Files of some 50 bytes: windows of 33 hold one border or two, at other places each."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{i} the quick brown fox jumps over {'the lazy dog'[: i % 12]}\n")
    return folder


@pytest.fixture(scope="module", params=RUNS)
def ranks(request, tmp_path_factory, text):
    """The number of ranks, their folder, and what the first and the last one got."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["flash_delta.training"])  # imported once, for the processes of both sizes
    mp.start_processes(work, (size, folder, text), nprocs=size, start_method="forkserver")
    return size, folder, [torch.load(folder / f"{rank}.pt") for rank in (0, size - 1)]


def assert_same_run(got, want, tolerance):
    assert len(got[0]) == len(want[0])
    for ours, theirs in zip(got[0], want[0], strict=True):
        assert ours == {name: pytest.approx(value, rel=max(tolerance, 1e-6)) for name, value in theirs.items()}
    for name, parameter in want[1].items():
        torch.testing.assert_close(got[1][name], parameter, rtol=tolerance, atol=tolerance)


def test_ranks_train_as_one_process_does(ranks, text, tmp_path):
    size, _, (first, last) = ranks
    for name, (changes, _) in RUNS[size].items():
        # What ranks round to bfloat16 they sum in other orders, and Adam takes the sign of a small gradient.
        tolerance = 2e-2 if "dtype" in changes else 1e-9
        assert_same_run(first[name], results(make(tmp_path / name, text, changes, Layout())), tolerance)
        assert first[name][0] == last[name][0]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_run_goes_on_with_another_number_of_ranks(ranks, text, tmp_path):
    _, folder, (first, last) = ranks
    alone = make(tmp_path, text, RUNS[2]["packed"][0], Layout())
    for resumed in (first["resumed"], last["resumed"], results(alone, folder / "packed" / "checkpoint-2")):
        assert_same_run(resumed, first["packed"], 1e-9)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_stop_together_though_one_got_the_signal(ranks):
    _, folder, (first, last) = ranks
    assert first["stopped"] == last["stopped"] == (3, 15)
    assert latest_checkpoint(folder / "stopped").name == "checkpoint-3"


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_end_together_though_one_is_wrong(ranks):
    _, folder, (first, last) = ranks
    assert first["diverged"] == last["diverged"]
    assert first["diverged"].startswith("step 3: grad_norm: nan: the run diverged, lower --lr")
    assert first["diverged"].endswith(f"{folder}/diverged/checkpoint-2 is kept")


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiled_blocks_under_fsdp(ranks):
    _, _, (first, _) = ranks
    model = tiny_model(torch.float64, MIXERS[:1])
    (sum(loss_of_row(model, row) for row in range(2)) / 2).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(first["compiled"][name], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_float32_gates_between_bfloat16_weights_under_fsdp(ranks):
    _, _, (first, _) = ranks
    assert_gradients_in_bfloat16(first["bfloat16 weights"])


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_parameters_get_their_values_after_they_were_sharded(ranks):
    _, _, (first, _) = ranks
    fresh, made = first["fresh"], tiny_model(torch.bfloat16).state_dict()
    for name, p in fresh.items():
        assert p.dtype == made[name].dtype, name
        assert p.isfinite().all(), name
        if name.endswith("A_log"):
            assert 0 < p.exp().min() <= p.exp().max() <= 16.1, name
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(p)
            assert 0.99e-3 <= dt.min() <= dt.max() <= 0.101, name
        elif name.endswith("norm.weight"):
            assert torch.equal(p, made[name]), name
        else:
            assert p.float().std() == pytest.approx(made[name].float().std().item(), rel=0.7), name


def test_layouts_that_do_not_fit(ranks):
    size, _, (first, _) = ranks
    for name in ("context_parallel", "shard"):
        assert first[name] == f"{name}: expected a divisor of the number of ranks, {size}, got 3"


def test_a_batch_that_ranks_and_passes_cannot_share(text, tmp_path):
    with pytest.raises(ValueError, match=r"batch_size: expected a multiple of 3 .*accumulate=3.*, got 4"):
        make(tmp_path, text, {}, Layout(accumulate=3))
