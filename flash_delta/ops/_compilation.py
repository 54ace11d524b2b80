"""A switch for servers, after which nothing may be compiled."""

from types import ModuleType

from flash_delta.kernels import require_triton


class forbid_compilation:
    """From now on, in all threads, an op raises RuntimeError if it would have to compile a kernel.

    ``forbid_compilation()`` lasts for good. ``with forbid_compilation():`` lasts until the end of the block. The error
    names the op, the kernel, and what is new in the call: a dtype, strides that divide by 16 in another way, an
    address. The ban also holds for the convolutions and norms of `flash_delta.modules`.
    :func:`flash_delta.ops.serving.warmup` does not compile these, so let layers run once before. Kernels of other
    libraries may still be compiled. Without Triton nothing is compiled at all.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_delta_rule, forbid_compilation
        >>> x = torch.randn(1, 64, 2, 32)
        >>> with forbid_compilation():  # serve
        ...     o, _ = chunk_delta_rule(x, x, x, torch.rand(1, 64, 2), use_qk_l2norm_in_kernel=True)
    """

    def __init__(self) -> None:
        self.switch = _switch()
        self.before = self.switch is not None and self.switch.forbid(True)

    def __enter__(self) -> "forbid_compilation":
        return self

    def __exit__(self, *_: object) -> None:
        if self.switch is not None:
            self.switch.forbid(self.before)


def _switch() -> ModuleType | None:
    """The module with the switch of the kernels, if Triton is installed."""
    try:
        require_triton()
    except ModuleNotFoundError:
        return None
    from flash_delta.kernels.runtime import forbid

    return forbid
