"""Documents side by side in rows, by positions that restart: convolution, layers and model, against each one alone."""

import pytest
import torch
from test_model import assert_close
from tiny_layers import LAYERS, D, random
from tiny_model import KINDS, build, tokens
from torch.nn import functional as F

from flash_delta import chunk_gated_delta_rule, chunk_kda
from flash_delta.layers import AttentionState, GatedDeltaNet, KimiDeltaAttention, MixerState
from flash_delta.layers.documents import forget_at_starts, number_documents
from flash_delta.models import FlashDeltaForCausalLM
from flash_delta.models.heads import CACHE
from flash_delta.modules import causal_conv1d
from flash_delta.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of kernels; a CPU for Triton's interpreter
ROWS = [[5, 1, 1, 2, 9, 66, 1], [66, 9, 1, 3, 4, 1, 1]]  # lengths of documents: around a chunk, around the taps
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS])
T = POSITIONS.shape[1]


def alone(f, x):
    """``f`` of every document of x [2, T, ...], in its place."""
    rows = [[f(piece) for piece in x[b : b + 1].split(lengths, dim=1)] for b, lengths in enumerate(ROWS)]
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def with_gradients(y, leaves):
    dy = random(*y.shape, seed=9).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    ("positions", "mask", "want"),
    [
        ([0, 1, 0, 1, 0], None, [0, 0, 1, 1, 2]),
        ([7, 8, 0, 1, 2], None, [0, 0, 1, 1, 1]),  # the end of a document that began elsewhere
        ([0, 0, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]),  # left padding, as `generate` numbers it
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]),  # and as others do
        ([0, 1, 2, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]),  # right padding
        ([0, 1, 0, 0, 1], [1, 1, 0, 1, 1], [0, 0, 0, 1, 1]),  # padding between documents
        ([0, 0, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0]),  # a piece of a padded prompt
    ],
)
def test_starts(positions, mask, want):
    mask = None if mask is None else torch.tensor([mask])
    assert number_documents(torch.tensor([positions]), mask).tolist() == [want]


def test_numbers_are_found_without_reading_a_value():
    """Meta tensors have no values."""
    assert number_documents(POSITIONS.to("meta"), torch.ones(2, T, dtype=torch.bool, device="meta")).shape == (2, T)
    layer = KimiDeltaAttention(hidden_size=D, head_dim=4, num_heads=2, lower_bound=-5.0).to("meta")
    assert layer(torch.empty(2, T, D, device="meta"), position_ids=POSITIONS.to("meta")).shape == (2, T, D)


@pytest.mark.parametrize("W", [1, 4])
def test_convolution(W):
    leaves = [t.requires_grad_() for t in (random(2, T, 5), random(5, W, seed=1), random(5, seed=2))]
    y, state = causal_conv1d(*leaves, "silu", seq_idx=number_documents(POSITIONS).int())
    want = alone(lambda x: causal_conv1d(x, *leaves[1:], "silu")[0], leaves[0])
    assert state is None
    for got, expected in zip(with_gradients(y, leaves), with_gradients(want, leaves), strict=True):
        assert_close(got, expected)


def number(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)


def test_kernels_of_the_convolution():
    """Bit for bit: what stands in place of other documents is what stands in front of a row."""
    pytest.importorskip("triton")
    torch.use_deterministic_algorithms(True)
    lengths = [3, 1, 1, 9]
    tensors = random(1, 14, 5), random(5, 4, seed=1), random(5, seed=2)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in tensors]
    seq_idx = number(lengths)
    y, _ = causal_conv1d(*leaves, "silu", seq_idx=seq_idx, backend="triton")
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(DEVICE)
    want, _ = causal_conv1d(*leaves, "silu", cu_seqlens=bounds, backend="triton")
    assert torch.equal(y, want)
    for got, expected in zip(with_gradients(y, leaves), with_gradients(want, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_idx": torch.zeros(2, 8, dtype=torch.int)}, r"seq_idx: expected a tensor \[2, 9\] or \[1, 9\], got"),
        ({"seq_idx": torch.zeros(2, 9)}, "seq_idx: expected dtype torch.int32 or torch.int64, got torch.float32"),
        ({"seq_idx": [0] * 9}, "seq_idx: expected a tensor .* got list"),
        ({"seq_idx": torch.zeros(1, 9, dtype=torch.int), "output_final_state": True}, "seq_idx: expected None with an"),
    ],
)
def test_convolution_refuses(options, message):
    with pytest.raises(ValueError, match="causal_conv1d: " + message):
        causal_conv1d(torch.zeros(2, 9, 3), torch.zeros(3, 4), **options)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    leaves = [random(2, T, D).requires_grad_(), *layer.parameters()]
    got = with_gradients(layer(leaves[0], position_ids=POSITIONS), leaves)
    for a, b in zip(got, with_gradients(alone(layer, leaves[0]), leaves), strict=True):
        assert_close(a, b)
    bounds = F.pad(torch.tensor(ROWS[0]).cumsum(0), (1, 0))
    assert_close(got[0][:1], layer(leaves[0][:1], cu_seqlens=bounds))
    assert_close(got[0][:1], layer(leaves[0][:1], cu_seqlens=bounds, position_ids=POSITIONS[:1]))
    with torch.no_grad():  # short rows are stepped through
        for b in range(2):  # of either row, the first one's positions are given for both
            few = leaves[0][[b, 0], :9]
            assert_close(layer(few, position_ids=POSITIONS[:1, :9])[1:], got[0][:1, :9])


@pytest.mark.parametrize("name", ["gdn-grouped", "kda-bounded", "attention"])
def test_padded_documents(name):
    """Padding on either side and between documents, and documents beside it."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x, mask = random(2, T, D), torch.ones(2, T, dtype=torch.bool)
    mask[0, :5] = mask[0, -1:] = mask[1, 66:75] = False  # whole documents of ROWS
    leaves = [x.requires_grad_(), *layer.parameters()]
    y = layer(x.where(mask[..., None], torch.nan), attention_mask=mask, position_ids=POSITIONS)
    want = alone(layer, x).where(mask[..., None], 0)
    for a, b in zip(with_gradients(y, leaves), with_gradients(want, leaves), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("name", ["gdn", "kda-bounded", "attention"])
@torch.no_grad()
def test_positions_without_a_restart_change_nothing(name):
    """Padded prompts, pieces of them and decoding: not one bit, so that the ops are called as ever."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x, mask = random(2, 24, D), torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    new = AttentionState if name == "attention" else MixerState
    ours, theirs = new(), new()
    for a, b in ((0, 3), (3, 20), (20, 21), (21, 24)):
        piece, seen = x[:, a:b], mask[:, :b]
        y = layer(piece, seen, ours, position_ids=positions[:, a:b])
        assert torch.equal(y, layer(piece, seen, theirs))


def test_restarts_beside_a_state_are_refused():
    layer = GatedDeltaNet(hidden_size=D, head_dim=4, num_heads=2)
    with pytest.raises(ValueError, match="position_ids: expected one document per row beside a state or cache"):
        layer(torch.zeros(2, T, D), state=MixerState(), position_ids=POSITIONS)
    with pytest.raises(ValueError, match=r"position_ids: expected shape \[B, T\] = \[2, 9\] or"):
        layer(torch.zeros(2, 9, D), position_ids=POSITIONS)


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, pytest.param(chunk_kda, marks=pytest.mark.long)])
def test_kernels(op):
    """Strong gates, and a document before whose numbers are huge: none of it gets across, nor back."""
    pytest.importorskip("triton")
    torch.use_deterministic_algorithms(True)
    lengths, K = [3, 66, 1, 5], 16
    n = sum(lengths)
    seq_idx = number(lengths)
    q, k, v = (random(1, n, 1, K, seed=i).to(DEVICE, torch.float32) for i in range(3))
    g = -random(1, n, 1, K, seed=3).abs().to(DEVICE, torch.float32)
    g[:, ::2], g[:, 1::2] = g[:, ::2] * 0.01, g[:, 1::2] * 90
    g = g if op is chunk_kda else g[..., 0].clone()
    beta = random(1, n, 1, seed=4).sigmoid().to(DEVICE, torch.float32)
    v[:, :3] *= 1e20
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta)]

    def run(*tensors, **options):
        return op(*tensors, use_qk_l2norm_in_kernel=True, **options)[0]

    options = {"backend": "triton"}
    o = run(q, k, v, forget_at_starts(g, seq_idx), beta, **options)
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    want = run(*leaves, cu_seqlens=bounds.to(DEVICE), cu_seqlens_cpu=bounds, **options)
    torch.testing.assert_close(o[:, 3:], want[:, 3:], rtol=1e-5, atol=1e-5)
    do = torch.ones_like(o)
    do[:, :3] = 0
    for got, expected in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(want, leaves, do), strict=True):
        assert got.isfinite().all()
        assert (got[:, :3] == 0).all()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
@pytest.mark.parametrize(
    ("op", "backend"), [(chunk_gated_delta_rule, None), (chunk_gated_delta_rule, "triton"), (chunk_kda, None)]
)
def test_half_precision_on_a_gpu(op, backend):
    """By whichever backend goes first, too: what the first document holds changes no bit of the others and of their
    gradients, and these are near those of bounds."""
    lengths, H, K = [100, 1, 300, 64, 47], 16, 128
    seq_idx, n = number(lengths), sum(lengths)
    q, k, v = (random(1, n, H, K, seed=i).to(DEVICE, torch.bfloat16) for i in range(3))
    g = -random(1, n, H, K, seed=3).abs().to(DEVICE, torch.float32)
    g = g if op is chunk_kda else g[..., 0].clone()
    beta = random(1, n, H, seed=4).sigmoid().to(DEVICE, torch.float32)

    def run(v, g, **options):
        leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
        gate = forget_at_starts(leaves[3], seq_idx) if not options else leaves[3]
        o, _ = op(*leaves[:3], gate, leaves[4], use_qk_l2norm_in_kernel=True, backend=backend, **options)
        do = torch.ones_like(o)
        do[:, : lengths[0]] = 0
        return [t[:, lengths[0] :] for t in (o, *torch.autograd.grad(o, leaves, do))]

    other = v.clone()
    other[:, : lengths[0]] *= 1e4
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(DEVICE)
    for got, same, want in zip(run(v, g), run(other, g), run(v, g, cu_seqlens=bounds), strict=True):
        assert torch.equal(got, same)
        assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_model(kind):
    """Logits, loss and gradients; no first token of a document is a target."""
    model, ids = build(kind), tokens(2, T)
    parameters = list(model.parameters())
    output = model(ids, position_ids=POSITIONS, labels=ids)
    assert getattr(output, CACHE) is None
    want = alone(lambda piece: model(piece, use_cache=False).logits, ids)
    assert_close(output.logits, want)
    same = POSITIONS[:, 1:] > 0
    loss = F.cross_entropy(want[:, :-1][same], ids[:, 1:][same])
    assert_close(output.loss, loss)
    for a, b in zip(torch.autograd.grad(output.loss, parameters), torch.autograd.grad(loss, parameters), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"return_seq_idx": True, "return_flash_attn_kwargs": True}])
def test_model_with_the_collator_of_transformers(options):
    """The decoder takes it all without its head, too: trl computes losses of its own from what it returns."""
    from transformers import DataCollatorWithFlattening

    model = build("hybrid")
    documents = [tokens(n, seed=n).tolist() for n in (4, 9, 2)]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in documents])
    want = torch.cat([model(torch.tensor([ids]), use_cache=False).logits for ids in documents], dim=1)
    assert_close(model(**batch).logits, want)
    del batch["labels"]
    assert_close(model.lm_head(model.model(**batch, use_cache=False).last_hidden_state), want)
    with pytest.raises(ValueError, match=r"position_ids: expected positions .* with seq_idx, got None"):
        model(batch["input_ids"], seq_idx=torch.zeros_like(batch["input_ids"]))


def test_compiled_model():
    torch._dynamo.reset()
    model, ids = build("hybrid"), tokens(2, T)
    want = model(ids, position_ids=POSITIONS).logits
    assert_close(torch.compile(model, fullgraph=True, backend="eager")(ids, position_ids=POSITIONS).logits, want)


@pytest.mark.long
def test_compiled_training():
    """One graph, also where layers run again in the backward pass."""
    torch._dynamo.reset()
    model, ids = build("hybrid").train(), tokens(2, T)
    parameters = list(model.parameters())
    want = model(ids, position_ids=POSITIONS, labels=ids).loss
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, position_ids=POSITIONS, labels=ids).loss
    assert_close(loss, want)
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(want, parameters), strict=True):
        assert_close(a, b)


def test_model_refuses_restarts_beside_a_cache():
    model: FlashDeltaForCausalLM = build("hybrid")
    with pytest.raises(ValueError, match="position_ids: expected one document per row beside a state or cache"):
        model(tokens(2, T), position_ids=POSITIONS, use_cache=True)
