"""A layer of fla, on fla's own ops or, after ``register()``, on this library's. The groups `fla-*` time it. Looked at:
fla 0.6.0.

Nothing calls ``unregister()``, because each contestant has a process of its own.
"""

from importlib.util import find_spec

from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.bench.contestants.call import GIVEN, of_layers


def unsupported() -> str | None:
    return None if find_spec("fla") else "the layer is one of fla, which is not installed"


def prepare(workload: Workload, x: dict[str, Tensor], *, registered: bool = False) -> Call:
    from fla import layers

    from flash_delta.integrations.fla import register

    report = register() if registered else None
    w, kind = workload, layers.KimiDeltaAttention if workload.member == "kda" else layers.GatedDeltaNet
    with x["hidden_states"].device:
        widths = {"expand_v": w.V / w.K, "head_dim": w.K, "num_heads": w.H, "num_v_heads": w.HV}
        each = [kind(w.hidden, **widths) for _ in range(w.layers)]
    given = {name: x[name].long() for name in GIVEN if name in x}  # the documented dtype
    call = of_layers(workload, x, each, given)

    def run() -> tuple[Tensor, None]:
        results = call.run()
        if report is not None and report.left:
            raise RuntimeError(f"register: expected no call left to fla, got {report.left}")
        return results

    return call._replace(run=run)
