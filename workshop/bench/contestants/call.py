"""The call that a contestant returns from ``prepare``, and that of layers as users run them. A form of layers is

* "called": the layers as they are; they are timed as eager calls and, if they can be captured, as a CUDA graph
* "compiled": ``torch.compile`` with its defaults, and "reduce-overhead" with this mode
* "graphed": ``torch.cuda.make_graphed_callables``
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.check.layer import INPUTS

NO_LAYER = "no layer of transformers or fla calls it"
NO_CHOICE = "it leaves no choice of what is kept for the backward pass"
GIVEN = ("cu_seqlens", "attention_mask")  # the layers' other arguments, where a row has them
OWN_GRAPHS = ("reduce-overhead", "graphed")  # forms whose graphs hold their memory from call to call


class Stack(nn.Module):
    """Layers one after the other. Each gets the same ``given`` arguments. Of several results the first one counts."""

    def __init__(self, layers: Sequence[nn.Module], given: dict[str, Tensor]):
        super().__init__()
        self.layers, self.given = nn.ModuleList(layers), given

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(hidden, **self.given)
            hidden = y if isinstance(y, Tensor) else y[0]
        return hidden


def of_layers(workload: Workload, x: dict[str, Tensor], layers: Sequence[nn.Module], given: dict[str, Tensor]) -> Call:
    """The call of layers in the row's form, with the parameters in ``x``."""
    training = workload.kind == "training"
    hidden = x["hidden_states"].detach().requires_grad_(training)
    stack = Stack(layers, given).to(hidden.device, hidden.dtype).train(training)
    named = stack.layers if workload.layers > 1 else stack.layers[0]
    named.load_state_dict({name: t for name, t in x.items() if name not in INPUTS})
    step = formed(stack.requires_grad_(training and not workload.frozen), workload.form, hidden)

    def run() -> tuple[Tensor, None]:
        with torch.set_grad_enabled(training):
            return step(hidden), None

    return Call(run, {"hidden_states": hidden} | dict(named.named_parameters()))


def formed(stack: nn.Module, form: str, hidden: Tensor) -> Callable[[Tensor], Tensor]:
    if form == "graphed":
        sample = torch.randn_like(hidden).requires_grad_(hidden.requires_grad)
        return torch.cuda.make_graphed_callables(stack, (sample,))
    if form not in ("compiled", "reduce-overhead"):
        return stack
    compiled = torch.compile(stack, dynamic=False, mode="default" if form == "compiled" else form)

    def step(hidden: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the results of the last step are not read any more
        return compiled(hidden)

    return step
