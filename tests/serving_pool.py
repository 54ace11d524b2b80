"""A pool of states under test, and what in float64 has to be in every slot of it."""

import random

import torch
from serving_truth import bits, coarser

from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import assert_accurate

SLOTS = 48
CANARIES = (0, SLOTS - 1)  # nobody's
NULL = CANARIES[0]  # all calls say that this one is padding
NOT_A_SLOT = (-1, SLOTS, -(2**31), 2**31 - 1, NULL)
IS_SLOT = range(NULL + 1, SLOTS)
TOGETHER = 20  # calls whose outputs are judged as one tensor


class Pool:
    """Slots with gaps between them, and memory before and behind them; what nobody wrote is NaN.

    ``want`` says for each slot that somebody wrote what is in it, ``[HV, K, V]`` float64: what the recurrence makes of
    the tokens so far, with the roundings that the ops promise and no other. ``around``: calls also have an output norm
    and a convolution, whose windows of this dtype lie in slots of their own, with gaps.
    """

    H, HV, K, V = 1, 2, 8, 16
    W = 4  # taps of the convolution, whose windows hold the inputs before the next token

    def __init__(self, dtype, v_first, device, seed, around=None):
        self.dtype, self.v_first, self.device, self.random = dtype, v_first, device, random.Random(seed)
        rows, columns = (self.V, self.K) if v_first else (self.K, self.V)
        shape = (SLOTS + 4, self.HV, rows + 1, columns + 2)
        self.memory = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.slots, self.states = self.views(self.memory)
        self.around, D = around, 2 * self.H * self.K + self.HV * self.V
        shape = (SLOTS + 4, D + 1, self.W + 1)
        self.window_memory = torch.full(shape, float("nan"), dtype=around or torch.float32, device=device)
        self.windows = self.windows_in(self.window_memory)
        self.convolution = Convolution(self.windows, *self.randn((D, self.W), (D,)))
        self.free = [slot for slot in range(SLOTS) if slot not in CANARIES]
        self.want: dict[int, torch.Tensor] = {}
        self.calls, self.outputs, self.index_dtypes = 0, [], {}

    def randn(self, *shapes):
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        return [torch.randn(shape, generator=generator).to(self.device) for shape in shapes]

    def layer(self, B, T):
        """What calls have around the rule."""
        if self.around is None:
            return {}
        gate, weight = self.randn((B, T, self.HV, self.V), (self.V,))
        return {"convolution": self.convolution, "output_norm": OutputNorm(gate, weight)}

    def views(self, memory):
        """The slots as the ops are given them, and as ``[SLOTS, HV, K, V]``."""
        slots = memory[2:-2, :, 1:, 2:]
        return slots, slots.mT if self.v_first else slots

    def windows_in(self, memory):
        return memory[2:-2, 1:, 1 : self.W]

    def take(self):
        """A random free slot."""
        return self.free.pop(self.random.randrange(len(self.free)))

    def release(self, slots):
        """What is read of a slot before it is written again shows as NaN."""
        for slot in slots:
            self.want.pop(slot, None)
        self.free += slots
        self.slots[slots] = float("nan")
        self.windows[slots] = float("nan")

    def canary(self):
        return self.random.choice(CANARIES)

    def no_slot(self):
        return self.random.choice(NOT_A_SLOT)

    def index(self, name, values):
        """Each kind of indices in a dtype of its own: kernels are compiled for them, and for all mixtures of five kinds
        on a GPU that took longer than ten thousand steps."""
        dtype = self.index_dtypes.setdefault(name, self.random.choice((torch.int32, torch.int64)))
        return torch.tensor(values, dtype=dtype, device=self.device)

    def judge_windows(self, written, before):
        """Windows are inputs as they came. ``written``: slot -> window; ``before``: the memory at the call's start."""
        for slot, window in written.items():
            self.windows_in(before)[slot] = window
        assert torch.equal(bits(before), bits(self.window_memory)), f"call {self.calls} left other windows"

    def judge(self, o, want_o, written, before):
        """A call's outcome is as accurate as the dtypes allow, zero where there is padding, and every number in memory
        that it had not to write keeps its bits. ``written``: slot -> state; ``before``: the memory at its start."""
        self.calls += 1
        which = f"call {self.calls}"
        assert torch.equal(o.cpu() == 0, want_o == 0), f"{which}: other rows than expected are zero"
        self.outputs.append((o.flatten(), want_o.flatten()))
        if len(self.outputs) == TOGETHER:
            self.judge_outputs()
        if written:
            places = list(written)
            got, dtype = self.states[places], coarser(o.dtype, self.dtype)
            assert_accurate(f"state_pool after {which}", got, torch.stack(list(written.values())), dtype)
            self.views(before)[1][places] = got
        assert torch.equal(bits(before), bits(self.memory)), f"{which} wrote where it should not"
        self.want |= written

    def judge_outputs(self):
        """Judges the outputs of several calls together. A first token gives scale (q . k) v. Where q . k cancels, a
        call with no other token has few digits left."""
        if self.outputs:
            o, want = (torch.cat(of) for of in zip(*self.outputs, strict=True))
            assert_accurate(f"o of the calls up to {self.calls}", o, want, coarser(o.dtype, self.dtype))
            self.outputs = []
