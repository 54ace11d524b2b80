"""Random packings and pools on a CPU: a few small draws, through the kernels, too, and proof that a miss is found."""

import os
from importlib.util import find_spec

import pytest
import torch
from random_packings import B16, F32, FORMS, Form, Round, together

from flash_delta.reference.recurrent import recurrent

if find_spec("triton") is not None:
    from test_hopper_loop import on_cpu  # noqa: F401 (a fixture)
    from test_hopper_pool import launched  # noqa: F401 (a fixture)

    from flash_delta.kernels.hopper.plans.tiles import SLIM

SMALL = {"H": 1, "HV": 2, "K": 64}
POOL = Form("gdn", pool=F32, checkpoints="stride", **SMALL)
TINY = [
    Form("gdn", **SMALL),
    Form("kda", raw=False, **SMALL),
    POOL,
    Form("kda", gates="unbounded", pool=B16, v_first=False, **SMALL),
]
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")


def make(form, draws=2, sequences=4, tokens=110):
    return Round(form, draws, 1, "cpu", sequences, tokens)


def check(made, backend):
    wrong, worst = made.judge(*made.run(backend))
    assert not wrong
    assert 0 < worst <= 1


@pytest.mark.parametrize("channels", [(), (8,)], ids=["gdn", "kda"])
def test_the_truth_is_the_recurrence(channels):
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    tokens = randn(1, 30, 2, 8) / 3, randn(1, 30, 2, 8) / 3, randn(1, 30, 6, 5)
    tokens = *tokens, -randn(1, 30, 6, *channels).abs(), randn(1, 30, 6)
    states = randn(4, 6, 8, 5)
    given = {"scale": None, "erase": "decayed", "initial_state": states, "cu_seqlens": [0, 3, 3, 20, 30]}
    _, part = recurrent(*(x[:, 20:24] for x in tokens), initial_state=states[3:])
    want = *recurrent(*tokens, **given), part[0]
    o, final, kept = together(*tokens, **given, goals=[(2, 17), (0, 0), (3, 4)])
    for got, right in zip((o, final, kept[2]), want, strict=True):
        assert torch.allclose(got, right, rtol=1e-12, atol=1e-12)
    assert torch.equal(kept[:2], torch.stack([final[2], states[0]]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_a_gpu(form):
    """On the torch backend."""
    check(make(form, sequences=12, tokens=150), "torch")


@interpreted
@pytest.mark.parametrize("form", TINY, ids=str)
def test_triton(form):
    check(make(form), "triton")


@interpreted
def test_the_loop_of_hopper(on_cpu):
    """On three programs, so that some scan several sequences and some none."""
    made = make(TINY[0])
    on_cpu(SLIM, 3)  # every call from here on
    check(made, None)


@interpreted
def test_a_pool_of_hopper(launched):
    check(make(POOL), "hopper")
    assert launched() in (None, [1, 1])


@pytest.fixture(scope="module")
def results():
    """Returns a round on a pool and its results, which are right."""
    made = make(POOL, draws=4, sequences=8, tokens=200)
    o, pool = made.run("torch")
    assert made.judge(o, pool)[0] == []
    return made, o, pool


def longest(made):
    return max((n for n in range(len(made.lengths)) if not (made.between | made.dead)[n]), key=made.lengths.__getitem__)


def test_a_wrong_token_is_found(results):
    """In the largest sequence: the last of its tokens lacks what it reads from the state."""
    made, o, pool = results
    n, o = longest(made), o.clone()
    o[0, made.bounds[n + 1] - 1] = 0
    (told,), worst = made.judge(o, pool)
    assert worst > 1
    assert f"of {made.lengths[n]} tokens, is off by" in told
    assert str(made.form) in told
    assert "seed 1: o of draw" in told


def test_nan_and_what_is_not_zero_are_found(results):
    made, o, pool = results
    n = longest(made)
    for fault, at in ((torch.nan, n), (1e-3, int(made.between.nonzero()[0])), (1e-3, int(made.dead.nonzero()[0]))):
        broken = o.clone()
        assert made.lengths[at]
        broken[0, made.bounds[at], 0, 0] = fault
        (told,), _ = made.judge(broken, pool)
        assert "o of draw" in told


def test_wrong_states_are_found(results):
    """Two sequences' in each other's slots, a checkpoint that is 2 % too small, a slot that no sequence writes."""
    made, o, pool = results
    (one, *_), (two, *_) = [state for state in made.states if state[2] is None][:2]
    swapped = pool.clone()
    swapped[[one, two]] = pool[[two, one]]
    assert len(made.judge(o, swapped)[0]) == 2
    slot, *_ = next(state for state in made.states if state[2] is not None)
    small = pool.clone()
    small[slot] *= 0.98
    assert "state of draw" in made.judge(o, small)[0][0]
    nobody = next(slot for slot in range(len(pool)) if slot not in {slot for slot, *_ in made.states})
    touched = pool.clone()
    touched[nobody, 0, 0, 0] = 1
    assert made.judge(o, touched)[0] == [f"{made.form}, seed 1: a slot of nobody has changed"]


def test_a_state_that_is_not_handed_over_is_found(results, monkeypatch):
    """A fault of kernels: one sequence starts from zeros."""
    made, *_ = results
    n = next(n for n in range(len(made.lengths)) if made.read[n] >= 0 and not made.dead[n] and made.lengths[n])
    monkeypatch.setattr(made, "has", [has and i != n for i, has in enumerate(made.has)])
    wrong, _ = made.judge(*made.run("torch"))
    assert wrong
    assert all(f"of {made.lengths[n]} tokens" in told for told in wrong)
