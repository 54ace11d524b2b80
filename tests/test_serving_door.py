"""The door of serving: what it refuses, remembers and documents, and how torch.compile goes through it."""

import inspect
import re

import pytest
import torch
from serving_truth import DEVICES, KINDS, make_call, needs_triton, run, slots
from torch._dynamo.testing import CompileCounterWithBackend

import flash_delta
from flash_delta.ops import _decode
from flash_delta.problem import Inputs

z, INDEX = torch.zeros, torch.int64


def index(*shape):
    return z(shape, dtype=INDEX)


WRONG = [  # changed arguments, what the message must contain
    (make_call(T=17), "q: expected 1 to 16 tokens (axis 1), got 17"),
    (make_call(T=0), "q: expected 1 to 16 tokens (axis 1), got 0"),
    ({"v": z(2, 3, 2, 23)}, "state_pool: expected a tensor [slots, 2, 23, 16], got shape [9, 2, 24, 16]"),
    ({"state_v_first": False}, "state_pool: expected a tensor [slots, 2, 16, 24], got shape [9, 2, 24, 16]"),
    ({"state_pool": z(9, 2, 24, 16, dtype=INDEX)}, "state_pool: expected a dtype among torch.float16, "),
    ({"state_pool": z(9, 2, 24, 16, device="meta")}, "state_pool: expected a tensor on cpu like q, got one on meta"),
    ({"state_pool": z(1, 2, 24, 16).expand(9, -1, -1, -1)}, "state_pool: expected slots with memory of their own, got"),
    ({"state_pool": None}, "state_pool: expected a tensor [slots, 2, 24, 16], got None"),
    ({"read_indices": [0, 1]}, "read_indices: expected a tensor [2], got list"),
    ({"read_indices": index(3)}, "read_indices: expected a tensor [2], got shape [3]"),
    ({"read_indices": index(2, 3)}, "read_indices: expected a tensor [2], got shape [2, 3]"),
    ({"read_indices": z(2)}, "read_indices: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ({"num_accepted_tokens": index(2)}, "read_indices: expected a tensor [2, W], got shape [2]"),
    (
        {"num_accepted_tokens": index(1), "read_indices": index(2, 3)},
        "num_accepted_tokens: expected a tensor [2], got shape [1]",
    ),
    ({"write_indices": index(3)}, "write_indices: expected a tensor [2], got shape [3]"),
    ({"write_indices": index(2, 2)}, "write_indices: expected a tensor [2, 3], got shape [2, 2]"),
    ({"write_indices": index(2).to("meta")}, "write_indices: expected a tensor on cpu like q, got one on meta"),
    ({"parent_idx": index(2)}, "parent_idx: expected a tensor [2, 3], got shape [2]"),
    ({"parent_idx": index(2, 3)}, "write_indices: expected a tensor [2, 3] beside parent_idx: tokens go on from "),
    (
        {"parent_idx": index(2, 3), "write_indices": index(2)},
        "write_indices: expected a tensor [2, 3] beside parent_idx: tokens go on from these slots, got shape [2]",
    ),
    ({"scale": torch.tensor(1.0)}, "scale: expected a number or None, got a tensor"),
    ({"g": None}, "g: expected a tensor [2, 3, 2], got None"),
    ({"use_gate_in_kernel": True}, "A_log: expected a tensor of 2 elements with use_gate_in_kernel=True, got None"),
    ({"backend": "cuda"}, "backend: expected one of triton, torch, got 'cuda'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[row[1].split(", got")[0] for row in WRONG])
def test_bad_input(changes, message):
    x = make_call() | changes
    for _ in range(2):  # nothing is remembered of a refusal
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_delta.decode_gated_delta_rule(**x)


def test_remembered_calls_are_looked_at_again_when_something_changes():
    x = make_call()
    flash_delta.decode_gated_delta_rule(**x)
    for name, t in (
        ("read_indices", x["read_indices"].float()),
        ("k", x["k"][:1]),
        ("beta", x["beta"].double().long()),
    ):
        with pytest.raises(ValueError, match=name):
            flash_delta.decode_gated_delta_rule(**(x | {name: t}))
    assert flash_delta.explain(flash_delta.decode_gated_delta_rule, **x).backend == "torch"


@needs_triton
def test_what_the_kernel_cannot_do_it_says():
    x = make_call(K=257, device=DEVICES["triton"])
    with pytest.raises(ValueError, match="backend 'triton' cannot run this: K and V have to be from 1 to 256"):
        flash_delta.decode_gated_delta_rule(**(x | {"backend": "triton"}))
    x = make_call(pool=torch.float64, device=DEVICES["triton"])
    with pytest.raises(ValueError, match=r"cannot run this: it computes in float32, .* the pool is torch.float64"):
        flash_delta.decode_gated_delta_rule(**(x | {"backend": "triton"}))


@needs_triton
def test_calls_with_pools_of_other_sizes_are_launched_anew():
    """How many slots there are is part of what is launched, though not of what is compiled."""
    from flash_delta.kernels.triton.launcher import make_call as look_at

    shapes = []
    for count in (9, 10):
        x = make_call(slots=count)
        problem = flash_delta.explain(flash_delta.decode_gated_delta_rule, **x).problem
        inputs = Inputs(*(x[name] for name in ("q", "k", "v", "g", "beta")))
        shapes.append(look_at(problem, inputs, ("test",), x["state_pool"], x["read_indices"]).shape)
    assert shapes[0].steps is not shapes[1].steps
    assert shapes[0].key == shapes[1].key


def test_the_torch_backend_wants_indices_on_the_host():
    x = {name: t.to("meta") if torch.is_tensor(t) else t for name, t in make_call().items()}
    assert "reads the indices of slots on the host" in str(
        flash_delta.explain(flash_delta.decode_gated_delta_rule, **x)
    )


@pytest.mark.parametrize("name", ["decode_gated_delta_rule", "decode_kda"])
def test_every_argument_is_documented(name):
    doc = inspect.getdoc(getattr(flash_delta, name)) + inspect.getdoc(flash_delta.decode_gated_delta_rule)
    for argument in inspect.signature(getattr(flash_delta, name)).parameters:
        assert f"\n    {argument}: " in doc, argument


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on importing its compiler
@pytest.mark.parametrize("kind", ["gdn", "kda-bounded"])
def test_compiled_is_eager(kind):
    """One operator that writes to the pool; in one graph for all numbers of tokens."""
    op, counter = KINDS[kind][0], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for T in (3, 5, 7):
        x = make_call(kind, T=T)
        x["write_indices"] = slots([4, 5], x)
        o, pool = run(kind, x, None)
        again = x["state_pool"].clone()
        assert torch.equal(compiled(**(x | {"state_pool": again})), o)
        assert torch.equal(again, pool)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    torch._dynamo.reset()


def test_operator():
    x = make_call("kda-raw") | {"op": "decode_kda", "gate": "channel", "erase": "decayed", "scale": None}
    x |= {"recurrent": True, "l2norm": True, "raw_gate": True, "raw_beta": True, "neg_eigval": False}
    torch.library.opcheck(_decode.operator, [x.get(name) for name in (*_decode.TENSORS, *_decode.FIELDS)] + [None])
