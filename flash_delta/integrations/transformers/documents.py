"""Documents packed in rows of transformers' models. This module gets them from ``position_ids`` to the ops.

A model's layers do not pass ``position_ids`` to linear attention, but they pass all of ``**kwargs``. The ops read
``seq_idx``, which numbers documents. So ``seq_idx`` is added to the arguments of a model's forward. It is an argument
like others, so gradient checkpointing, compilers and threads need no special code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, isclass, signature, unwrap
from typing import Any

from torch import Tensor, nn

from flash_delta.integrations._context import CACHE_NAMES, with_context
from flash_delta.layers.documents import number_documents, refuse_restarts


def walks_layers(cls: Any, module: str) -> bool:
    """Whether ``cls`` is a model of ``module`` whose forward calls layers with ``position_ids`` and ``**kwargs``."""
    if not (isclass(cls) and cls.__module__ == module and issubclass(cls, nn.Module) and "forward" in vars(cls)):
        return False
    own = unwrap(cls.forward)
    parameters = signature(own).parameters
    takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    return "position_ids" in parameters and takes_more and "layers" in own.__code__.co_names


def separating(forward: Callable) -> Callable:
    """Wraps the ``forward`` of such a model, so that it tells its layers about documents. Does not wrap it twice."""
    return _separating(getattr(forward, "without_documents", forward))


@cache
def _separating(forward: Callable) -> Callable:
    names = tuple(signature(forward).parameters)[1:]  # without self

    @wraps(forward)
    def call(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        return forward(self, **_with_documents(self, given))

    call.without_documents = forward
    call.__module__, call.__qualname__ = __name__, f"separating({forward.__qualname__})"
    return call


def _with_documents(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, and ``seq_idx`` if documents may start anywhere in its rows.

    Rows count as packed where transformers' attention treats them so: without a cache and without a mask of padding.
    """
    if given.get("cp_context") is not None:
        if not _separates(model) or "indexed_attention" in (getattr(model.config, "layer_types", None) or ()):
            name, got = type(model).__name__, type(given["cp_context"]).__name__
            raise ValueError(f"cp_context: expected None (the indexed attention of {name} sees one rank), got a {got}")
        return with_context(model, given)
    positions, seq_idx = _text_positions(given.get("position_ids")), given.get("seq_idx")
    if given.get("cu_seq_lens_q") is not None or (seq_idx is None and (positions is None or positions.shape[-1] == 1)):
        return given
    if positions is None:  # attention has no other sign of documents
        raise ValueError("position_ids: expected positions [B, T] that restart at 0 with seq_idx, got None")
    if given.get("use_cache") is None and not _continues(given):
        given = given | {"use_cache": False}  # with a cache attention mixes documents, so make none unless asked
    mask = given.get("attention_mask")
    if isinstance(mask, dict):  # one for each kind of layer, as `generate` makes them for a static cache
        mask = mask.get("linear_attention")
    is_padded = isinstance(mask, Tensor) and mask.dim() == 2
    if is_padded or _has_cache(model, given):
        if seq_idx is not None:
            raise ValueError("seq_idx: expected None with a cache or attention_mask, got a tensor")
        refuse_restarts(positions, mask if is_padded else None, beside="a cache or attention_mask")
        return given
    if not _separates(model):
        name = type(model).__name__
        raise ValueError(
            f"position_ids: expected None (the indexed attention of {name} mixes a row's documents), got a tensor"
        )
    return given | {"seq_idx": number_documents(positions).int() if seq_idx is None else seq_idx}


def _text_positions(position_ids: Tensor | None) -> Tensor | None:
    """The text's positions [B, T]: of [1 or 4, B, T] the first. None for [3, B, T], which are places in pictures."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.dim() == 3 and position_ids.shape[0] in (1, 4) else None


def _separates(model: nn.Module) -> bool:
    """Whether the model's softmax attention, if it has any, separates documents by their positions."""
    makes_masks = "create_causal_mask" in unwrap(type(model).forward).__code__.co_names
    return makes_masks or set(getattr(model.config, "layer_types", None) or ()) <= {"linear_attention"}


def _continues(given: dict[str, Any]) -> bool:
    return any(given.get(name) is not None for name in CACHE_NAMES)


def _has_cache(model: nn.Module, given: dict[str, Any]) -> bool:
    checkpointed = getattr(model, "gradient_checkpointing", False) and model.training
    return _continues(given) or (bool(given.get("use_cache")) and not checkpointed)
