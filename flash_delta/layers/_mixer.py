"""The parts that all mixers share around their op: projections, short convolutions, packing and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.layers._gate import GateParameters
from flash_delta.layers.documents import forget_at_starts, read_documents
from flash_delta.layers.packing import Packing, check_width
from flash_delta.layers.state import KEPT, MixerState, Replay, in_two
from flash_delta.modules import GatedRMSNorm, RMSNorm, ShortConvolution
from flash_delta.ops._check.options import as_bool, as_size
from flash_delta.parallel import ContextParallel

# Inference runs up to this many tokens one by one, because the chunk op always computes a whole chunk. On a CPU, a
# chunk of a small GDN layer at batch 1 takes as long as 16 steps. With a larger layer or batch it is more steps.
RECURRENT_TOKENS = 16


class Mixer(GateParameters):
    """Projections, short convolutions, packing and state around an op of the family:

        q, k, v = act(conv(proj(x)))     o = op(heads(q, k, v), gates(x))     y = o_proj(norm(o, x))

    A subclass defines its gates, its norm and its ops. Names and shapes of the parameters are fla's, so fla's
    checkpoints load.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_k_dim: int,
        head_v_dim: int,
        mode: str,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
        backend: str | None,
        num_kv_heads: int | None = None,  # heads of k and v before the subclass repeats them
        use_beta: bool = True,
        updates: int = 1,  # of the state per token: so many times as many channels of k, v and beta
        activations: tuple[str | None, ...] = ("silu", "silu", "silu"),  # of q, k and v
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        hidden_size, num_heads = as_size(layer, "hidden_size", hidden_size), as_size(layer, "num_heads", num_heads)
        num_v_heads = num_heads if num_v_heads is None else as_size(layer, "num_v_heads", num_v_heads)
        conv_size, conv_bias = as_size(layer, "conv_size", conv_size), as_bool(layer, "conv_bias", conv_bias)
        if num_v_heads % num_heads != 0:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {mode!r}")
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.mode, self.layer_idx, self.backend, self.activations = mode, layer_idx, backend, activations
        self.use_short_conv, self.conv_size = as_bool(layer, "use_short_conv", use_short_conv), conv_size
        k_heads, v_heads = (num_heads, num_v_heads) if num_kv_heads is None else (num_kv_heads, num_kv_heads)
        widths = num_heads * head_k_dim, updates * k_heads * head_k_dim, updates * v_heads * head_v_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False) for width in widths)
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, updates * num_v_heads, bias=False)
        self.o_proj = nn.Linear(num_v_heads * head_v_dim, hidden_size, bias=False)
        if self.use_short_conv:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                ShortConvolution(width, conv_size, conv_bias, activation, backend)
                for width, activation in zip(widths, activations, strict=True)
            )

    def _add_norm(self, use_gate: bool, eps: float, activation: str = "swish") -> None:
        self.use_gate = use_gate
        if use_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)
            self.o_norm = GatedRMSNorm(self.head_v_dim, eps, activation, self.backend)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps, self.backend)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """q, k, v [B, T, heads * width] after their convolutions -> the op's arguments, [B, T, heads, width]."""
        K, V = self.head_k_dim, self.head_v_dim
        return {"q": q.unflatten(-1, (-1, K)), "k": k.unflatten(-1, (-1, K)), "v": v.unflatten(-1, (-1, V))}

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """x [B, T, D] -> the op's g and beta, if the op has them."""
        raise NotImplementedError

    def _activate(self, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
        """The op's arguments from those with raw gates, which ops take as they are."""
        return tokens

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Changes the op's arguments so that no document of a row sees the document before it."""
        return tokens | {"g": forget_at_starts(tokens["g"], seq_idx)}, options

    def _normalize(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, T, HV, V], x [B, T, D] -> normalised (and gated) o."""
        return self.o_norm(o, self.g_proj(x).view_as(o)) if self.use_gate else self.o_norm(o)

    def _op(self, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The token-by-token or the chunkwise op."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: [B, T, D].
            attention_mask: [B, T], or [B, past + T] of which the last T columns are used, bool or integers; zeros are
                padding, on either side. A token's output does not depend on padding; padding's own output is 0.
            state: the layer starts from this state and leaves the new state in it. None starts from zeros and keeps
                nothing. A state that records its past excludes cu_seqlens and cp_context.
            cu_seqlens: boundaries [N + 1], int32 or int64, of sequences packed in one row (B = 1); excludes
                attention_mask. Tokens after the last boundary give 0.
            cp_context: the split of one packed row over many ranks. hidden_states are this rank's tokens, and the
                state's rows are this rank's sequences. Excludes attention_mask and cu_seqlens, and needs mode "chunk".
            position_ids: [B, T] or [1, T]. A 0 after another token starts a document, which does not see the document
                before it. Ignored if there are cu_seqlens or a cp_context, which say where documents start at less
                cost. With a state a row is one document: a restart is then refused on a CPU, and not noticed on a GPU.

        Returns:
            [B, T, D] in hidden_states' dtype.

        Raises:
            ValueError: if a shape or dtype is not as above, or if arguments exclude each other.
        """
        if cp_context is not None:
            if self.mode != "chunk":
                got = type(cp_context).__name__
                raise ValueError(f"cp_context: expected None in a layer with mode {self.mode!r}, got a {got}")
            cp_context.check(hidden_states, attention_mask, cu_seqlens)
            cu_seqlens = cp_context.local_bounds(hidden_states.device)
        packing = Packing.of(hidden_states, attention_mask, cu_seqlens)
        check_width(hidden_states, self.hidden_size)
        seq_idx = read_documents(hidden_states, position_ids, attention_mask, cu_seqlens, state)
        seq_idx = seq_idx if seq_idx is None else packing.pack(seq_idx[..., None])[..., 0]
        x = packing.pack(hidden_states)
        if state is None and seq_idx is None and cp_context is None and self._mixes(hidden_states.shape[1]):
            return packing.unpack(self.o_proj(self._mix(x, packing.cu_seqlens)))
        past = MixerState() if state is None else state
        replay = past.next_replay(packing, self.conv_size) if past.record_past else None
        if replay is not None and hidden_states.shape[1] > KEPT:
            return in_two(self.forward, hidden_states, attention_mask, past)
        tokens, conv = self.tokens(x, past.conv, state is not None, packing.cu_seqlens, cp_context, seq_idx, replay)
        options = self.options() | {"initial_state": past.recurrent, "output_final_state": state is not None}
        if seq_idx is not None:
            tokens, options = self._separate(tokens, options, seq_idx)
        if cp_context is not None:
            o, recurrent = self._op(recurrent=False)(**tokens, **options, cp_context=cp_context)
        elif replay is not None:
            o, recurrent = replay.run(self._op(recurrent=True), tokens, options, packing)
        else:
            op = self._op(recurrent=self._steps_through(hidden_states.shape[1]))
            o, recurrent = op(**tokens, **options, cu_seqlens=packing.cu_seqlens)
        past.conv, past.recurrent = conv, recurrent
        return packing.unpack(self.output(o, x))

    def _mixes(self, T: int) -> bool:
        """Whether `_mix` computes T tokens."""
        return False

    def _mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """x [B, T, D] -> what o_proj projects [B, T, HV * V], for sequences that start from zeros."""
        raise NotImplementedError

    # The layer's work before and after the op, for engines that keep the states themselves (flash_delta.ops.serving).

    def tokens(
        self,
        x: Tensor,
        conv: tuple[Tensor, Tensor, Tensor] | None = None,
        keep_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
        seq_idx: Tensor | None = None,
        replay: Replay | None = None,
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
        """The op's arguments that are computed from the tokens.

        Args:
            x: the layer's input [B, T, D].
            conv: the convolutions' initial states [N, D, W], as in `MixerState`; None means zeros.
            keep_state: whether to return the states after the last token.
            cu_seqlens: boundaries [N + 1] of sequences packed in one row (B = 1).
            cp_context: the split of a row over ranks. The tokens and cu_seqlens are this rank's.
            seq_idx: numbers of the tokens' documents [B, T], for the convolutions; see `documents.py`.
            replay: gets the convolutions' inputs.

        Returns:
            The op's arguments by name, q and k [B, T, H, K], v [B, T, HV, V], gates [B, T, HV] or with channels, raw if
            `options` tells the op so; and the convolutions' states or None. Of k, v and beta each update has a row.
        """
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        splits = cp_context is not None and self.use_short_conv
        halo = cp_context.halo(projected, conv, self.conv_size) if splits else None
        gates = self._gates(x)  # while the halo is under way
        if halo is not None:
            projected, conv = halo.wait()
        if replay is not None and self.use_short_conv:
            replay.inputs = projected
        (q, k, v), conv = self._convolve(projected, conv, keep_state, cu_seqlens, seq_idx)
        return self._activate(self._heads(q, k, v) | gates), conv

    def options(self) -> dict[str, Any]:
        """The op's arguments that depend on the layer and not on the tokens, by name. All ops of the layer's member
        take them, also the serving ops."""
        return {"backend": self.backend}

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """The layer's output [B, T, D] from the op's o [B, T, HV, V] and the layer's input x [B, T, D]."""
        return self.o_proj(self._normalize(o, x).flatten(-2))

    def _steps_through(self, T: int) -> bool:
        return self.mode == "fused_recurrent" or (T <= RECURRENT_TOKENS and not torch.is_grad_enabled())

    def _convolve(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        past: tuple[Tensor, Tensor, Tensor] | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
        seq_idx: Tensor | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
        """q, k, v before their convolutions -> after them, and the convolutions' states if they are kept."""
        if not self.use_short_conv:
            acted = zip(projected, self.activations, strict=True)
            return tuple(y if activation is None else nn.functional.silu(y) for y, activation in acted), None
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        results = [
            convolution(y, initial_state, keep_state, cu_seqlens, seq_idx)
            for convolution, y, initial_state in zip(convolutions, projected, past or (None,) * 3, strict=True)
        ]
        outputs, states = zip(*results, strict=True)
        return outputs, states if keep_state else None
