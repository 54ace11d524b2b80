"""Turns a batch of vLLM into calls of the serving ops: decoding rows, drafts, prompts, and mixtures of these."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import flash_delta
from flash_delta.integrations._refusal import refusal
from flash_delta.ops.serving import OutputNorm

logger = logging.getLogger("vllm.flash_delta")  # vLLM shows loggers whose names begin with its own
VARIABLE = "FLASH_DELTA_VLLM"


class Tokens(NamedTuple):
    """The tensors of n tokens, one after another, before the convolution."""

    q: Tensor  # [n, H, K]
    k: Tensor  # [n, H, K]
    v: Tensor  # [n, HV, V]
    g: Tensor  # [n, HV] or [n, HV, K], raw
    beta: Tensor  # [n, HV], raw
    gate: Tensor | None  # [n, HV, V], for the output norm; None: vLLM does the norm
    out: Tensor  # [n, HV, V]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        return Tokens._make([None if t is None else change(t) for t in self])

    def first(self, count: int) -> "Tokens":
        return self.each(lambda t: t if t.shape[0] == count else t[:count])


class Layer(NamedTuple):
    """What all calls of a layer have in common."""

    rule: str  # "gated_delta_rule" or "kda"
    options: dict[str, Any]
    norm: Any  # the module of the output norm


OpCall = tuple[Callable[..., Tensor], dict[str, Any]]  # an op and its arguments


def calls_of(layer: Layer, x: Tokens, m: Any) -> tuple[list[OpCall], tuple[Tensor, ...]]:
    """The ops to call for a batch. ``m``: vLLM's metadata. If tokens had to be gathered, the second result says for
    each call where its tokens were, and its outputs have to be copied there."""
    if m.spec_sequence_masks is None:
        return [_prompts(layer, x, m) if m.num_prefills else _rows(layer, x, m)], ()
    if not m.num_prefills and not m.num_decodes:
        return [_drafts(layer, x, m)], ()
    places = (m.spec_token_indx, m.non_spec_token_indx)
    if _drafts_come_first(m) and _is_aligned(x.out, m.num_spec_decode_tokens):
        count, places = m.num_spec_decode_tokens, ()
        drafts, others = x.first(count), x.each(lambda t: _from(t, count))
    else:
        drafts, others = (x.each(lambda t, at=at: t[at]) for at in places)
    return [_drafts(layer, drafts, m), _prompts(layer, others, m)], places


def _drafts_come_first(m: Any) -> bool:
    """Whether all drafts come before all other rows. vLLM mostly orders batches in this way. vLLM 0.26 does not tell
    the host."""
    rows = getattr(m, "spec_sequence_masks_cpu", None)
    return rows is not None and bool(rows[: m.num_spec_decodes].all())


def _is_aligned(t: Tensor, start: int) -> bool:
    """Whether the address of ``t[start]`` is a multiple of 16 bytes if that of t is."""
    return start * t.stride(0) * t.element_size() % 16 == 0


def _from(t: Tensor, start: int) -> Tensor:
    """``t[start:]``. Compiled code depends on whether addresses are multiples of 16 bytes. So gates of a few heads may
    have to be copied."""
    rest = t[start:]
    return rest if _is_aligned(t, start) else t.new_empty_strided(rest.shape, t.stride()).copy_(rest)


def _in_a_row(t: Tensor) -> Tensor:
    """[1, n, ...]. In a view, the stride of the first axis would depend on n, and compiled code depends on its
    remainder by 16. Here it is a multiple of 16."""
    shape, strides = t.shape, t.stride()
    return t.as_strided((1, *shape), (-(-shape[0] * strides[0] // 16) * 16, *strides))


def _each_alone(t: Tensor) -> Tensor:
    """[n, 1, ...]. For one token, both axes have strides as in `_in_a_row`."""
    return t.unsqueeze(1) if t.shape[0] > 1 else _in_a_row(t)


def _rows(layer: Layer, x: Tokens, m: Any) -> OpCall:
    """The call for decoding rows, with one token each."""
    rows = m.non_spec_state_indices_tensor[: x.q.shape[0]]
    return _call("decode", layer, x.each(_each_alone), {"read_indices": rows, "write_indices": rows})


def _drafts(layer: Layer, x: Tokens, m: Any) -> OpCall:
    table = m.spec_state_indices_tensor[: m.num_spec_decodes]
    more = {"read_indices": table, "write_indices": table, "num_accepted_tokens": m.num_accepted_tokens[: len(table)]}
    bounds = m.spec_query_start_loc[: len(table) + 1]
    return _call("decode", layer, x.each(_in_a_row), more | {"cu_seqlens": bounds})


def _prompts(layer: Layer, x: Tokens, m: Any) -> OpCall:
    """The call for prompts. Rows of one token may be among them."""
    rows = m.non_spec_state_indices_tensor
    more = {"read_indices": rows, "write_indices": rows, "has_initial_state": m.has_initial_state}
    more |= {"cu_seqlens": m.non_spec_query_start_loc, "max_prompts": m.num_prefills}
    checkpoint = getattr(m, "checkpoint", None)  # vLLM 0.26 copies states itself
    if checkpoint is not None:
        more["checkpoint_offsets"] = checkpoint.checkpoint_offsets
        more["checkpoint_indices"] = checkpoint.state_indices
    return _call("prefill", layer, x.each(_in_a_row), more)


def _call(kind: str, layer: Layer, x: Tokens, more: dict[str, Any]) -> OpCall:
    arguments = x._asdict() | layer.options | more
    gate = arguments.pop("gate")
    if gate is not None:
        norm = layer.norm
        arguments["output_norm"] = OutputNorm(gate, norm.weight, norm.eps, norm.activation)
    return getattr(flash_delta, f"{kind}_{layer.rule}"), arguments


def is_declined(module: Any) -> bool:
    return "_flash_delta_off" in module.__dict__


def decline(module: Any, reason: str) -> None:
    """Lets vLLM's own code run a layer from now on."""
    warn("this layer", reason)
    module._flash_delta_off = True


def warn(what: str, reason: Any) -> None:
    """Logs why vLLM's own code runs something. If vLLM has not set up its log yet, the line goes to stderr."""
    early = logging.StreamHandler()
    early.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if not logger.hasHandlers():
        logger.addHandler(early)
    logger.warning("%s: vLLM's own code runs %s: %s", VARIABLE, what, reason)
    logger.removeHandler(early)


def unfit(module: Any) -> str | None:
    """Why the ops cannot use the caches of a layer; None if they can."""
    if len(module.kv_cache) != 2:
        return f"it keeps {len(module.kv_cache)} caches, not windows and states alone"
    if getattr(module.cache_config, "use_kda_recoverssm", False):  # since vLLM 0.33
        return "with --use-replayssm vLLM has no memory for the states of draft tokens"
    return None


def run(module: Any, layer: Layer, x: Tokens, m: Any) -> bool:
    """Runs ``module`` between its projections. Returns False, and runs nothing, if the ops do not take it."""
    calls, places = calls_of(layer, x.first(m.num_actual_tokens), m)
    if not takes(module, calls):
        return False
    for op, arguments in calls:
        op(**arguments)
    for at, (_, arguments) in zip(places, calls, strict=False):  # ``places`` may be empty
        x.out.index_copy_(0, at, arguments["out"][0])
    return True


def takes(module: Any, calls: list[OpCall]) -> bool:
    """Whether the ops take all of a module's calls. If not, vLLM's own code runs it from now on."""
    seen = module.__dict__.setdefault("_flash_delta_seen", set())
    for op, arguments in calls:
        form = op.__name__, *[name for name, value in arguments.items() if value is not None]
        if form not in seen:
            reason = refusal(op, arguments)
            if reason is not None:
                decline(module, reason)
                return False
            seen.add(form)
    return True
