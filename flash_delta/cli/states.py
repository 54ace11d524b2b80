"""The work of `flash-delta check --states`: print how large a model's states are, and what fewer bits cost."""

from pathlib import Path
from typing import TYPE_CHECKING

from flash_delta.cli.environment import calm_threads, quiet_transformers, require_device
from flash_delta.cli.files import require_writable
from flash_delta.cli.tables import Table, show

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from flash_delta.testing.states import LayerStates

TOKENS = 2048  # of the text, unless the caller wants another number
FEWEST = 64
LETTERS = 16  # bytes of text per token that are enough


def states_fit(
    name: str, device: str, text: Path | None = None, tokens: int = TOKENS, results: Path | None = None
) -> bool:
    """Prints what a float16 pool does to the states of a model, and returns whether it holds them. Arguments: those of
    `flash-delta check --states`."""
    from flash_delta.integrations import transformers as integration
    from flash_delta.testing.states import HALF, measure_states, write_states

    quiet_transformers()
    where = require_device(device)
    if results is not None:
        require_writable("json", results)
    with integration.enable():
        model, tokenizer = _load(name)
        calm_threads(where, model.config.get_text_config().hidden_size)
        read = _tokens(text, tokenizer, tokens)
        layers = measure_states(model.to(where), read)
    if results is not None:
        write_states(results, name, len(read), layers, where)
    show([_table(layers, name, len(read))])
    fits = all(layer.fits_half for layer in layers)
    largest, ratio = max(layer.largest for layer in layers), max(layer.ratio for layer in layers)
    verdict = "fits" if fits else "does not fit"
    size = f"largest |S| {largest:.3g} of {HALF.max:,.0f}"
    print(f"float16: {verdict}, {size}, error {ratio:.2g} of bfloat16's or less")
    return fits


def _load(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model of a run, of a folder, or of this name on Hugging Face's hub, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    import flash_delta.models  # noqa: F401  transformers then knows this library's models
    from flash_delta.training import latest_checkpoint, load_model, load_tokenizer

    if not name:
        raise ValueError(f"states: expected a run, a folder or a name, got {name!r}")
    checkpoint = latest_checkpoint(name)
    if checkpoint is not None:
        return load_model(checkpoint), load_tokenizer(str(checkpoint))
    try:
        model = AutoModelForCausalLM.from_pretrained(name)
    except Exception as error:  # each library that reads a part has errors of its own
        raise ValueError(f"states: expected a model that transformers can load, got {name!r}: {error}") from error
    return model, load_tokenizer(name)


def _tokens(text: Path | None, tokenizer: "PreTrainedTokenizerBase", most: int) -> "Tensor":
    """The first tokens [T] of a file, or of what `flash-delta train` holds out of its default text."""
    from flash_delta.training import Corpus

    if text is None:
        found = bytes(Corpus.read().held_out[: LETTERS * most].tolist()).decode(errors="ignore")
    else:
        found = text.read_bytes()[: LETTERS * most].decode(errors="ignore")
    ids = tokenizer(found, add_special_tokens=False, return_tensors="pt").input_ids[0, :most]
    if len(ids) < FEWEST:
        raise ValueError(f"text: expected at least {FEWEST} tokens, got {len(ids)}")
    return ids


def _table(layers: "list[LayerStates]", name: str, tokens: int) -> Table:
    from flash_delta.testing.states import AT_REST, POOLS

    costs = (*POOLS, AT_REST)
    head = ("layer", "op", "largest", "typical", "smallest head", "below normal float16", *costs)
    rows = [
        (
            of.layer, of.op, f"{of.largest:.3g}", f"{of.typical:.2g}", f"{of.smallest:.2g}", f"{of.subnormal:.1%}",
            *(f"{of.errors[pool]:.1e}" for pool in costs),
        )
        for of in layers
    ]  # fmt: skip
    title = (
        f"states |S| of {name} over {tokens:,} tokens; typical: root mean square of the last state; then the relative "
        "L2 error of the last outputs against float64, with a pool of each dtype, and after int8 at rest"
    )
    return Table(head, rows, title)
