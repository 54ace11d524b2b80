"""A switch for servers: from some moment on nothing may be compiled."""

from types import ModuleType

from flash_delta.kernels import require_triton


class forbid_compilation:
    """From now on, in all threads, a call of an op that would have to compile a kernel raises RuntimeError instead.

    ``forbid_compilation()`` is for good; ``with forbid_compilation():`` until the end of the block, where what held
    before holds again. The error names the op, the kernel, and what the call has that no call before had: a dtype,
    strides that divide by 16 in another way, an address. The same holds for convolutions and norms of
    `flash_delta.modules`, of which a warmup knows nothing: let layers run once before. Nothing else changes, kernels of
    other libraries are none of its business, and without Triton nothing is ever compiled. See
    :func:`flash_delta.ops.serving.warmup`.
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
    """Of the kernels, which only Triton compiles."""
    try:
        require_triton()
    except ModuleNotFoundError:
        return None
    from flash_delta.kernels.runtime import forbid

    return forbid
