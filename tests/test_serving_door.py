"""The door of serving: what it refuses, remembers and documents, and how torch.compile goes through it."""

import inspect
import re

import pytest
import torch
from prefill_truth import OPS, bounds, make_prefill
from prefill_truth import run as run_prefill
from serving_truth import DEVICES, KINDS, make_call, needs_triton, run, slots
from test_serving_packed import packed
from test_serving_step import make_step
from torch._dynamo.testing import CompileCounterWithBackend

import flash_delta
from flash_delta.ops.serving import _run

z, INDEX = torch.zeros, torch.int64


def index(*shape):
    return z(shape, dtype=INDEX)


def make_packed(**changes):
    """18 tokens of two rows."""
    return make_call(B=1, T=18) | {"read_indices": index(2), "cu_seqlens": torch.tensor([0, 5, 18])} | changes


WRONG = [  # changed arguments, what the message must contain
    (make_call(T=17), "q: expected 1 to 16 tokens (axis 1), got 17"),
    (make_call(T=0), "q: expected 1 to 16 tokens (axis 1), got 0"),
    ({"v": z(2, 3, 2, 23)}, "state_pool: expected a tensor [slots, 2, 23, 16], got shape [9, 2, 24, 16]"),
    ({"state_v_first": False}, "state_pool: expected a tensor [slots, 2, 16, 24], got shape [9, 2, 24, 16]"),
    ({"state_pool": z(9, 2, 24, 16, dtype=INDEX)}, "state_pool: expected a dtype among torch.float16, "),
    ({"state_pool": z(9, 2, 24, 16, device="meta")}, "state_pool: expected a tensor on cpu like q, got one on meta"),
    (
        {"state_pool": z(1, 2, 24, 16).expand(9, -1, -1, -1)},
        "state_pool: expected no stride of 0 (slots have numbers of their own), got",
    ),
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
    ({"parent_idx": index(2, 3)}, "write_indices: expected a tensor [2, 3] with parent_idx: tokens continue from "),
    (
        {"parent_idx": index(2, 3), "write_indices": index(2)},
        "write_indices: expected a tensor [2, 3] with parent_idx: tokens continue from these slots, got shape [2]",
    ),
    (
        {"cu_seqlens": index(3)},
        "q: expected batch size 1 with cu_seqlens: pack the sequences into one row, got batch",
    ),
    (make_packed(cu_seqlens=[0, 3]), "cu_seqlens: expected a tensor or None, got list"),
    (make_packed(cu_seqlens=torch.tensor([0, 5, 19])), "cu_seqlens: expected bounds up to T = 18, got 19"),
    (make_packed(read_indices=index(3)), "read_indices: expected a tensor [2], got shape [3]"),
    (make_packed(write_indices=index(3, 4)), "write_indices: expected a tensor [2, 4], got shape [3, 4]"),
    (make_packed(write_indices=index(2, 17)), "write_indices: expected columns for 1 to 16 tokens (axis 1), got 17"),
    (
        make_packed(write_indices=index(2, 4), parent_idx=index(2, 3)),
        "parent_idx: expected a tensor [2, 4], got shape [2, 3]",
    ),
    (
        make_packed(write_indices=index(2), parent_idx=index(2, 4), write_pool=z(3, 3, 2, 24, 16)),
        "write_pool: expected room for 4 tokens (axis 1), got 3",
    ),
    (make_packed(out=z(2, 9, 2, 24)), "out: expected a tensor [1, 18, 2, 24], got shape [2, 9, 2, 24]"),
    ({"write_pool": z(5, 2, 24, 16)}, "write_indices: expected a tensor with write_pool, got None"),
    ({"write_pool": z(5, 2, 24, 15)}, "write_pool: expected a tensor [slots, 2, 24, 16], got shape [5, 2, 24, 15]"),
    ({"write_pool": z(5, 3, 2, 24, 15)}, "write_pool: expected a tensor [rows, S, 2, 24, 16], got shape [5, 3, 2, 24,"),
    ({"write_pool": [z(5, 2, 24, 16)]}, "write_pool: expected a tensor [slots, 2, 24, 16], got list"),
    ({"write_pool": z(5, 2, 24, 16, dtype=INDEX)}, "write_pool: expected a dtype among torch.float16, "),
    (
        {"write_pool": z(5, 1, 24, 16).expand(-1, 2, -1, -1), "write_indices": index(2)},
        "write_pool: expected no stride of 0 (slots have numbers of their own), got",
    ),
    (
        {"write_pool": z(5, 2, 2, 24, 16), "write_indices": index(2)},
        "write_pool: expected room for 3 tokens (axis 1), got 2",
    ),
    (
        {"write_pool": z(5, 3, 2, 24, 16), "write_indices": index(2, 3)},
        "write_indices: expected a tensor [2] with a write_pool of rows, got shape [2, 3]",
    ),
    (
        {"scale": torch.tensor(1.0)},
        "scale: expected a number or None (o is proportional to it: multiply o by a tensor), got a tensor",
    ),
    ({"null_slot": -1}, "null_slot: expected a number of at least 0 or None (an index below 0 is padding in any case)"),
    ({"out": z(2, 3, 2, 23)}, "out: expected a tensor [2, 3, 2, 24], got shape [2, 3, 2, 23]"),
    ({"out": z(2, 3, 2, 24).half()}, "out: expected dtype torch.float32, got torch.float16"),
    ({"out": z(2, 3, 2, 24).to("meta")}, "out: expected a tensor on cpu like q, got one on meta"),
    ({"out": z(2, 3, 24, 2).mT}, "out: expected a contiguous tensor, got strides [144, 48, 1, 2]"),
    ({"out": z(289)[1:].view(2, 3, 2, 24)}, "out: expected memory that begins at a multiple of 16 bytes, got 4 bytes"),
    ({"g": None}, "g: expected a tensor [2, 3, 2], got None"),
    ({"use_gate_in_kernel": True}, "A_log: expected a tensor of 2 elements with use_gate_in_kernel=True, got None"),
    ({"backend": "cuda"}, "backend: expected one of triton, hopper, torch, got 'cuda'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[row[1].split(", got")[0] for row in WRONG])
def test_bad_input(changes, message):
    x = make_call() | changes
    for _ in range(2):  # nothing is remembered of a refusal
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_delta.decode_gated_delta_rule(**x)


SEQUENCES = [  # the same of prefill: T = 73, N = 2
    ({"cu_seqlens": None}, "cu_seqlens: expected a tensor [N + 1], got None"),
    ({"cu_seqlens": [0, 70, 73]}, "cu_seqlens: expected a tensor [N + 1], got list"),
    ({"cu_seqlens": z(3)}, "cu_seqlens: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ({"cu_seqlens": torch.tensor([0, 70, 74])}, "cu_seqlens: expected bounds up to T = 73, got 74"),
    ({"cu_seqlens": torch.tensor([0, 70, 60])}, "cu_seqlens: expected bounds that do not decrease, got [0, 70, 60]"),
    ({"read_indices": index(3)}, "read_indices: expected a tensor [2], got shape [3]"),
    ({"read_indices": None}, "read_indices: expected a tensor [2], got None"),
    ({"write_indices": index(2, 1)}, "write_indices: expected a tensor [2], got shape [2, 1]"),
    ({"has_initial_state": index(2)}, "has_initial_state: expected dtype torch.bool, got torch.int64"),
    ({"has_initial_state": z(3).bool()}, "has_initial_state: expected a tensor [2], got shape [3]"),
    ({"has_initial_state": z(2).bool().to("meta")}, "has_initial_state: expected a tensor on cpu like q, got one on m"),
    ({"checkpoint_every": 64}, "checkpoint_indices: expected a tensor [2, M], got None"),
    ({"checkpoint_indices": index(2, 1)}, "checkpoint_every: expected a multiple of 64 with checkpoint_indices, if"),
    (
        {"checkpoint_indices": index(2), "checkpoint_offsets": index(2), "checkpoint_every": 64},
        "checkpoint_every: expected None with checkpoint_offsets: either a stride or offsets, got 64",
    ),
    ({"checkpoint_offsets": index(2)}, "checkpoint_indices: expected a tensor [2], got None"),
    (
        {"checkpoint_offsets": index(2), "checkpoint_indices": index(2, 1)},
        "checkpoint_indices: expected a tensor [2], got shape [2, 1]",
    ),
    (
        {"checkpoint_offsets": index(2, 1), "checkpoint_indices": index(2)},
        "checkpoint_offsets: expected a tensor [2], got shape [2, 1]",
    ),
    (
        {"checkpoint_offsets": [70, 3], "checkpoint_indices": index(2)},
        "checkpoint_offsets: expected a tensor [2], got list",
    ),
    (
        {"checkpoint_offsets": z(2), "checkpoint_indices": index(2)},
        "checkpoint_offsets: expected dtype torch.int32 or torch.int64, got torch.float32",
    ),
    (
        {"checkpoint_offsets": index(2).to("meta"), "checkpoint_indices": index(2)},
        "checkpoint_offsets: expected a tensor on cpu like q, got one on meta",
    ),
    (
        {"checkpoint_indices": index(2), "checkpoint_every": 64},
        "checkpoint_indices: expected a tensor [2, M], got shap",
    ),
    (
        {"checkpoint_indices": z(2, 1), "checkpoint_every": 64},
        "checkpoint_indices: expected dtype torch.int32 or torch.int64, got torch.float32",
    ),
    *(
        ({"checkpoint_every": every}, f"checkpoint_every: expected a positive multiple of 64 or None, got {every}")
        for every in (0, -64, 65, 64.0, True)
    ),
    *(
        ({"max_prompts": most}, f"max_prompts: expected a number of at least 0 or None, got {most}")
        for most in (-1, 1.0, True)
    ),
    (
        {"max_prompts": 1, "batch_invariant": True},
        "max_prompts: expected None with batch_invariant=True, which runs all sequences as prompts, got 1",
    ),
    (
        {"state_pool": z(6, 2, 24, 16).mT.contiguous()},
        "state_pool: expected a tensor [slots, 2, 24, 16], got shape [6, 2, 16, 24]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SEQUENCES, ids=[row[1].split(", got")[0] for row in SEQUENCES])
def test_bad_sequences(changes, message):
    x = make_prefill()
    flash_delta.prefill_gated_delta_rule(**x)  # what is remembered of a call does not let a worse one in
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_delta.prefill_gated_delta_rule(**(x | changes))


def test_plain_pools():
    """Whether a copy engine can describe them: slots without gaps inside, at multiples of 16 bytes."""
    x, size = make_prefill(), 2 * 24 * 16
    store = torch.zeros(40 * (size + 4) + 1)
    shape = x["state_pool"].shape[1:]
    for apart, first, plain in ((size, 0, True), (size + 4, 0, True), (size + 3, 0, False), (size, 1, False)):
        pool = store[first:].as_strided((9, *shape), (apart, *x["state_pool"].stride()[1:]))
        p = flash_delta.explain(flash_delta.prefill_gated_delta_rule, **(x | {"state_pool": pool})).problem
        assert p.pools.plain == plain, (apart, first)
    gaps = {"state_pool": torch.zeros(9, *shape[:-1], 2 * shape[-1])[..., ::2]}
    assert not flash_delta.explain(flash_delta.prefill_gated_delta_rule, **(x | gaps)).problem.pools.plain


@pytest.mark.parametrize(("changes", "message"), [
    ({"K": 7}, "K has to be from 8 to 128 and V from 8 to 512, they are 7 and 24"),
    ({"pool": torch.float64}, "it computes in float32, the tensors are torch.float32, the pool is torch.float64"),
])  # fmt: skip
@needs_triton
def test_what_the_kernels_cannot_do_they_say(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_delta.prefill_gated_delta_rule(**make_prefill(device=DEVICES["triton"], **changes), backend="triton")


def test_remembered_calls_are_looked_at_again_when_something_changes():
    x = make_call()
    flash_delta.decode_gated_delta_rule(**x)
    for name, t in (
        ("read_indices", x["read_indices"].float()),
        ("k", x["k"][:1]),
        ("beta", x["beta"].double().long()),
        ("state_pool", x["state_pool"].to("meta")),
    ):
        with pytest.raises(ValueError, match=name):
            flash_delta.decode_gated_delta_rule(**(x | {name: t}))
    assert flash_delta.explain(flash_delta.decode_gated_delta_rule, **x).backend == "torch"


@needs_triton
def test_what_the_kernel_cannot_do_it_says():
    x = make_call(K=257, device=DEVICES["triton"])
    with pytest.raises(ValueError, match="cannot run this: token by token K can be up to 256 and V up to 512"):
        flash_delta.decode_gated_delta_rule(**(x | {"backend": "triton"}))
    x = make_call(pool=torch.float64, device=DEVICES["triton"])
    with pytest.raises(ValueError, match=r"cannot run this: it computes in float32, .* the pool is torch.float64"):
        flash_delta.decode_gated_delta_rule(**(x | {"backend": "triton"}))


def numbers_and_name(slots):
    """The numbers that `decode` gets on a pool of so many slots, and what its compiled code depends on."""
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.plan import layouts_of
    from flash_delta.kernels.runtime.run import name_of
    from flash_delta.kernels.triton.serving.rows import plan_decode

    call = flash_delta.explain(flash_delta.decode_gated_delta_rule, **make_call(slots=slots))
    (step,) = plan_decode(call.problem, Chip("sm_90", 132), *map(layouts_of, call.groups)).steps
    return [a for a in step.arguments if type(a) is int], name_of(step)


@needs_triton
def test_calls_with_pools_of_other_sizes_are_launched_anew(process):
    """How many slots there are is part of what is launched, though not of what is compiled."""
    (few, name), (more, same) = process.map(numbers_and_name, (9, 10))
    assert {pair for pair in zip(few, more, strict=True) if pair[0] != pair[1]} == {(9, 10)}
    assert name == same


def test_the_torch_backend_wants_indices_on_the_host():
    x = {name: t.to("meta") if torch.is_tensor(t) else t for name, t in make_call().items()}
    assert "reads the indices of slots on the host" in str(
        flash_delta.explain(flash_delta.decode_gated_delta_rule, **x)
    )


@pytest.mark.parametrize("name", ["decode_gated_delta_rule", "decode_kda", "prefill_gated_delta_rule", "prefill_kda"])
def test_every_argument_is_documented(name):
    shared = getattr(flash_delta, f"{name.split('_')[0]}_gated_delta_rule")
    doc = inspect.getdoc(getattr(flash_delta, name)) + inspect.getdoc(shared)
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
        again, out = x["state_pool"].clone(), torch.ones_like(o)
        assert torch.equal(compiled(**(x | {"state_pool": again})), o)
        assert torch.equal(again, pool)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    again.copy_(x["state_pool"])
    assert torch.equal(compiled(**(x | {"state_pool": again, "out": out, "null_slot": 8})), o)
    assert torch.equal(out, o)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_drafts_are_eager():
    """A pool that is only written is written, also by packed rows."""
    compiled = torch.compile(KINDS["gdn"][0], fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (3, 5, 7):
        x = make_call("gdn", T=T) if T < 7 else make_packed()
        x |= {"write_pool": z(3, 7, *x["state_pool"].shape[1:]), "write_indices": slots([2, 0], x)}
        o, pool = run("gdn", x, None)
        again = x["write_pool"].clone()
        assert torch.equal(compiled(**(x | {"write_pool": again})), o)
        assert torch.equal(again, pool)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_prefill_is_eager():
    """In one graph for all lengths; with checkpoints it is another one, and another one with those at offsets."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPS["gdn-raw"], fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length, offset in ((66, False), (70, False), (81, False), (70, True)):
        x = make_prefill("gdn-raw", (length, 3, 0), slots=9)
        x |= {"checkpoint_indices": slots([[6], [7], [8]], x), "checkpoint_every": 64}
        if offset:
            x |= {"checkpoint_indices": slots([6, 7, 8], x), "checkpoint_every": None}
            x["checkpoint_offsets"] = slots([66, 2, 0], x)
        o, pool = run_prefill("gdn-raw", x, None)
        again = x["state_pool"].clone()
        assert torch.equal(compiled(**(x | {"state_pool": again})), o)
        assert torch.equal(again, pool)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3 + [counts[0] + 1]
    torch._dynamo.reset()


def test_lengths_are_values():
    """A call whose sequences have other lengths is like the one before, and is not what was remembered of it."""
    x = make_prefill("gdn", (70, 3))
    other = x | {"cu_seqlens": bounds([3, 70], x)}
    for y in (x, other, x):
        o, pool = run_prefill("gdn", y, None)
        for n in range(2):
            start, stop = y["cu_seqlens"][n : n + 2].tolist()
            want = flash_delta.chunk_gated_delta_rule(
                *(y[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")),
                initial_state=y["state_pool"][n : n + 1], output_final_state=True, state_v_first=True,
            )  # fmt: skip
            torch.testing.assert_close(o[:, start:stop], want[0])
            torch.testing.assert_close(pool[2 + n : 3 + n], want[1])


def opcheck(x):
    arguments = _run.operator._schema.arguments
    torch.library.opcheck(_run.operator, [x.get(argument.name) for argument in arguments[:-1]] + [None])


def test_operator():
    x = make_call("kda-raw") | {"op": "decode_kda", "kind": "channel", "erase": "decayed", "scale": None}
    x |= {
        "recurrent": True,
        "l2norm": True,
        "raw": True,
        "raw_beta": True,
        "neg_eigval": False,
        "batch_invariant": False,
    }
    opcheck(x | {"rolling": False})


def test_operator_of_drafts():
    """That write other pools than they read."""
    x, conv = make_step("gdn-raw", T=3)
    x |= {"op": "decode_gated_delta_rule", "kind": "scalar", "erase": "decayed", "recurrent": True, "l2norm": True}
    x |= {"raw": True, "raw_beta": True, "neg_eigval": False, "batch_invariant": False, "eps": 1e-5}
    x |= {"activation": "silu", "norm_gate": x["output_norm"].gate, "norm_weight": x["output_norm"].weight}
    x |= dict(zip(("conv_pool", "conv_weight", "conv_bias"), conv, strict=True))
    x |= {"write_pool": z(2, 3, *x["state_pool"].shape[1:]), "conv_write_pool": z(2, 3, *conv[0].shape[1:])}
    x |= {"write_indices": slots([1, 0], x), "rolling": False}
    opcheck(x)
    x = packed(x, [3, 1]) | {"conv_write_pool": None, "rolling": True, "conv_pool": z(9, conv[0].shape[1], 18)}
    opcheck(x | {"norm_gate": x["output_norm"].gate})


@pytest.mark.parametrize("offsets", [False, True])
def test_operator_of_prefill(offsets):
    x = make_prefill("gdn-raw") | {"op": "prefill_gated_delta_rule", "kind": "scalar", "erase": "decayed"}
    x |= {"has_initial_state": slots([1, 0], x).bool(), "checkpoint_indices": slots([[4], [5]], x)}
    x |= {"recurrent": False, "l2norm": True, "raw": True, "raw_beta": True, "neg_eigval": False}
    x |= {"checkpoint_every": 64, "max_prompts": 1, "batch_invariant": False, "rolling": False}
    if offsets:
        x |= {"checkpoint_indices": slots([4, 5], x), "checkpoint_offsets": slots([65, 3], x), "checkpoint_every": None}
    opcheck(x)
