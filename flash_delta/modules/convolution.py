"""Short depthwise causal convolution over a batch or over packed sequences, and its one-token step.

Equation, per channel d, with W taps and x_t the inputs of one sequence:

    y[t, d] = act(bias[d] + sum_{w=0}^{W-1} weight[d, w] x[t - (W-1) + w, d])

Inputs before t = 0 come from the sequence's state, the last W inputs seen so far (oldest first, [N, D, W]; the layout
of fla and of transformers). The next output reads W - 1 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_delta.modules._shards import own_shard
from flash_delta.ops._check.elementwise import check_documents
from flash_delta.ops._check.options import as_bool, as_size, refuse
from flash_delta.ops._elementwise import compute, convolve_token
from flash_delta.ops._operators.elementwise import CONVOLUTION, Convolved


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve every sequence with its channel's W taps::

        y[t, d] = act(bias[d] + sum_{w=0}^{W-1} weight[d, w] x[t - (W-1) + w, d])

    where inputs before t = 0 come from ``initial_state``, or are zeros.

    Args:
        x: inputs [B, T, D], float16, bfloat16, float32 or float64; 16-bit inputs are accumulated in fp32.
        weight: taps [D, W], of any of these dtypes, like bias and states. The last tap is for the current token.
        bias: [D]. Default None: no bias.
        activation: "silu" or None.
        initial_state: the last W inputs of each sequence [N, D, W], oldest first. Default None: zeros. N = B unless
            packed.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: sequence boundaries [N + 1], int32 or int64, on x's device, for N sequences packed in one row
            (B = 1). They start at 0, do not decrease and are at most T, which is not checked on a GPU. Sequences may
            be empty. Tokens after cu_seqlens[-1] are ignored, even if they are NaN.
        backend: "triton", "torch" or "hopper", which runs Triton's convolution. It runs the call or refuses it. Default
            None: the one that ``FLASH_DELTA_BACKEND`` names, or else the first that can run the call.
        seq_idx: integers [B, T] or [1, T] that number the documents of a row from left to right, in steps of one. The
            convolution at a token reads only the token's own document. It takes W convolutions and cu_seqlens takes
            one, so use it only if bounds are not known. Not allowed with states.

    Returns:
        y [B, T, D] in x's dtype, exactly 0 after cu_seqlens[-1], and the final state [N, D, W] in x's dtype or None.
        An empty sequence returns its initial state. Both are differentiable in x, weight, bias and initial_state.

    Raises:
        ValueError: naming the argument, what was expected and what came; or if the backend cannot run this.

    Example:
        >>> import torch
        >>> from flash_delta.modules import causal_conv1d
        >>> x, weight = torch.randn(2, 100, 64), torch.randn(64, 4)
        >>> y, state = causal_conv1d(x, weight, activation="silu", output_final_state=True)
        >>> y.shape, torch.equal(state, x[:, -4:].mT)  # the state is the last 4 inputs
        (torch.Size([2, 100, 64]), True)
    """
    op = "causal_conv1d"
    if seq_idx is None:
        tensors = Convolved(x, weight, bias, initial_state, cu_seqlens)
        return compute(CONVOLUTION, tensors, (op, activation, output_final_state), backend)
    if initial_state is not None or output_final_state:
        refuse(op, "seq_idx", "None with an initial or final state", "a tensor")
    check_documents(op, x, seq_idx)
    return _convolve_documents(Convolved(x, weight, bias, None, cu_seqlens), activation, backend, seq_idx), None


def _convolve_documents(c: Convolved, activation: str | None, backend: str | None, seq_idx: Tensor) -> Tensor:
    """Convolves documents in W runs. A window of W tokens covers at most W documents, so never two whose numbers are
    equal modulo W. Each run has the documents of one remainder, and zeros in place of the others. Zeros also come
    before a row, so the bits are those of a document alone."""
    y, W = None, c.weight.shape[1]
    place = (seq_idx % W).unsqueeze(-1)  # [B or 1, T, 1]
    for i in range(W):
        own = place == i
        fields = "causal_conv1d", activation, False
        part, _ = compute(CONVOLUTION, c._replace(x=c.x.where(own, 0)), fields, backend)
        y = part if y is None else part.where(own, y)
    return y


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Shift one token per sequence into ``state``, in place, and return the output of the convolution at that token.

    The result equals that of ``causal_conv1d(x[:, None], weight, bias, activation, state, True)``, but the state gets
    no gradient.

    Args:
        x: one input per sequence [N, D].
        state: the last W inputs of each sequence [N, D, W], oldest first. It is overwritten with the new last W inputs.
        weight: taps [D, W].
        bias: [D]. Default None: no bias.
        activation: "silu" or None.
        backend: as in :func:`causal_conv1d`.

    Returns:
        y [N, D] in x's dtype.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta.modules import causal_conv1d_update
        >>> x, state, weight = torch.randn(2, 64), torch.zeros(2, 64, 4), torch.randn(64, 4)
        >>> y = causal_conv1d_update(x, state, weight, activation="silu")
        >>> y.shape, torch.equal(state[:, :, -1], x)  # the state has moved on
        (torch.Size([2, 64]), True)
    """
    return convolve_token(Convolved(x, weight, bias, state), activation, backend)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution with its parameters in the shapes of `nn.Conv1d(D, D, W, groups=D)`.

    Checkpoints of fla and transformers load as they are. Parameters start as those of `nn.Conv1d`: uniform in
    +-1/sqrt(W).

    Args:
        hidden_size: channels D.
        kernel_size: taps W, at least 1.
        bias: whether to add a bias per channel. Default False.
        activation: "silu" or None. Default "silu".
        backend: as `causal_conv1d`'s. Default None.

    Raises:
        ValueError: if a size, the bias or the activation is not as above.

    Example:
        >>> import torch
        >>> from flash_delta.modules import ShortConvolution
        >>> y, _ = ShortConvolution(64, kernel_size=4)(torch.randn(2, 100, 64))
        >>> y.shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        hidden_size, kernel_size = as_size(op, "hidden_size", hidden_size), as_size(op, "kernel_size", kernel_size)
        if activation not in (None, "silu"):
            refuse(op, "activation", "'silu' or None", repr(activation))
        self.backend = backend
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if as_bool(op, "bias", bias) else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from U(-1/sqrt(W), 1/sqrt(W)). The fan-in of each channel is W."""
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] -> (y [B, T, D], final state [N, D, W] or None); arguments as in `causal_conv1d`."""
        options = self.activation, initial_state, output_final_state, cu_seqlens, self.backend, seq_idx
        bias = None if self.bias is None else own_shard(self.bias)
        return causal_conv1d(x, own_shard(self.weight).squeeze(1), bias, *options)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation}"
