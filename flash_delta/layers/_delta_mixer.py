"""The parts that mixers with a gated delta rule share: l2-normalised q and k, a write strength, a decay by A_log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.layers._gate import initial_dt_bias
from flash_delta.layers._mixer import Mixer
from flash_delta.layers._plain import Projection, is_plain, let_adjoin, project
from flash_delta.modules import GatedRMSNorm
from flash_delta.modules._shards import own_shard, shared
from flash_delta.modules.norm import ACTIVATIONS
from flash_delta.ops import fused_gdn_gate, fused_kda_gate
from flash_delta.ops.mixer import Layout, mix


class DeltaMixer(Mixer):
    """A mixer whose op computes its gates from raw activations:

        o = delta_rule(q, k, v, raw_gate(x), b_proj(x))

    with l2-normalised q and k and beta = sigmoid(b_proj(x)). A subclass names its gate.
    """

    allow_neg_eigval = False
    gate: str | None = None  # that of `mix`, if this op does what the mixer does

    def _add_gate(self, heads: int, channels: int = 1) -> None:
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A_log and dt_bias anew. Projections, convolutions and norms have methods of this name, too."""
        for parameter, fresh in zip((self.A_log, self.dt_bias), self.initial_gate(), strict=True):
            parameter.copy_(fresh)

    def initial_gate(self) -> tuple[Tensor, Tensor]:
        """Fresh values like A_log and dt_bias, which may be sharded."""
        raise NotImplementedError

    def _raw_gate(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> the gate's activation before A_log and dt_bias, in the op's shape."""
        raise NotImplementedError

    def _log_decay(self, raw: Tensor) -> Tensor:
        """The log decay that the op computes from the raw gate, in nats."""
        raise NotImplementedError

    def _mixes(self, T: int) -> bool:
        """One op does everything between plain projections, except for short inputs without gradients."""
        if self.gate is None or self._steps_through(T) or not self.use_short_conv:
            return False
        modules = self.q_conv1d, self.k_conv1d, self.v_conv1d, self.o_norm
        taps = all(m.bias is None and m.activation == "silu" for m in modules[:3])
        return taps and all(is_plain(m) and m.backend == self.backend for m in modules)

    def _mix(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        projected, layout = self._project(x)
        norm = self.o_norm
        return mix(
            projected,
            tuple(own_shard(m.weight) for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)),
            norm_weight=shared(norm.weight),
            layout=layout,
            gate=self.gate,
            norm_eps=norm.eps,
            norm_activation=getattr(norm, "activation", None) and ACTIVATIONS[norm.activation],
            allow_neg_eigval=self.allow_neg_eigval,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            **self.gate_options(),
        )

    def _project(self, x: Tensor) -> tuple[list[Tensor], Layout]:
        """The projections, and where they have q, k, v, z, g and beta."""
        projected, sources = project([Projection((name,), [m]) for name, m in self._projections().items()], x)
        sizes = self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        return projected, Layout.adjoining(*sizes, sources, self.gate)

    def _projections(self) -> dict[str, nn.Module]:
        """What projects q, k, v, z, g and beta."""
        raise NotImplementedError

    def _apply(self, fn, recurse: bool = True) -> DeltaMixer:
        super()._apply(fn, recurse)  # it moves or converts each parameter
        self._let_adjoin()
        return self

    def _let_adjoin(self) -> None:
        if self.gate is not None and self.q_proj.weight.is_cuda:
            let_adjoin([m for m in self._projections().values() if isinstance(m, nn.Linear)])

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        return {"g": self._raw_gate(x), "beta": self.b_proj(x)}

    def _separate(
        self, tokens: dict[str, Tensor], options: dict[str, Any], seq_idx: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        # No raw gate can give a log decay of -inf: a bounded gate has a least value, and others would have a NaN
        # gradient.
        options = options | {"use_gate_in_kernel": False} | dict.fromkeys(self.gate_options())
        return super()._separate(tokens | {"g": self._log_decay(tokens["g"])}, options, seq_idx)

    def options(self) -> dict[str, Any]:
        return (
            super().options()
            | {
                "use_qk_l2norm_in_kernel": True,
                "use_gate_in_kernel": True,
                "use_beta_sigmoid_in_kernel": True,
                "allow_neg_eigval": self.allow_neg_eigval,
            }
            | self.gate_options()
        )

    def gate_options(self) -> dict[str, Any]:
        """The options that turn the raw gate into log decays."""
        return {"A_log": own_shard(self.A_log), "dt_bias": own_shard(self.dt_bias)}


class ScalarGateMixer(DeltaMixer):
    """A mixer whose state decays by one number per head and token: -exp(A_log) * softplus(a_proj(x) + dt_bias) nats."""

    def _add_gate(self) -> None:
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        super()._add_gate(self.num_v_heads)

    def _projections(self) -> dict[str, nn.Module]:
        tokens = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        return tokens | ({"z": self.g_proj} if self.use_gate else {}) | {"g": self.a_proj, "beta": self.b_proj}

    def initial_gate(self) -> tuple[Tensor, Tensor]:
        """A uniform in (0, 16), dt log-uniform in [0.001, 0.1]."""
        # uniform_ may draw an exact 0. A_log would then be -inf, and training could not change it.
        A = torch.empty_like(self.A_log).uniform_(0, 16).clamp(min=1e-4)
        return A.log(), initial_dt_bias(self.dt_bias)

    def _raw_gate(self, x: Tensor) -> Tensor:
        return self.a_proj(x)  # [B, T, HV]

    def _log_decay(self, raw: Tensor) -> Tensor:
        dtype = torch.promote_types(raw.dtype, torch.float32)
        return fused_gdn_gate(raw, **self.gate_options(), output_dtype=dtype, backend=self.backend)


class ChannelGateMixer(DeltaMixer):
    """A mixer whose state decays by one number per head, key channel and token. f_proj and g_proj have rank V."""

    safe_gate, lower_bound = False, None

    def _add_parts(self, heads: int, norm_eps: float) -> None:
        """Adds the gate, which has so many heads, and the gated norm."""
        self.f_proj = self._low_rank(heads * self.head_k_dim, bias=False)
        self.g_proj = self._low_rank(self.num_v_heads * self.head_v_dim, bias=True)
        self._add_gate(heads, self.head_k_dim)
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, "sigmoid", self.backend)
        self._let_adjoin()

    def _low_rank(self, out_features: int, bias: bool) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(self.hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, out_features, bias=bias),
        )

    def initial_gate(self) -> tuple[Tensor, Tensor]:
        """A uniform in (1, 16), or 1 with safe_gate; dt log-uniform in [0.001, 0.1]."""
        A = torch.ones_like(self.A_log) if self.safe_gate else torch.empty_like(self.A_log).uniform_(1, 16)
        return A.log(), initial_dt_bias(self.dt_bias)

    def _raw_gate(self, x: Tensor) -> Tensor:
        return self.f_proj(x).unflatten(-1, (-1, self.head_k_dim))  # [B, T, heads, K]

    def _normalize(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_norm(o, self.g_proj(x).view_as(o))

    def _log_decay(self, raw: Tensor) -> Tensor:
        dtype = torch.promote_types(raw.dtype, torch.float32)
        return fused_kda_gate(raw, **self.gate_options(), output_dtype=dtype, backend=self.backend)

    def gate_options(self) -> dict[str, Any]:
        return super().gate_options() | {"lower_bound": self.lower_bound}
