"""The model card of a run: `README.md` in its folder, which a model hub shows. It has facts of the run alone."""

from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, TrainerState

from flash_delta.training.corpus import Summary
from flash_delta.training.settings import Settings

FILE = "README.md"
HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [flash_delta]
---
"""
CARD = """
# {name}

A language model of {parameters:,} parameters, trained by `flash-delta train`. Its layers mix tokens by {mixers}.

| text | |
|---|---|
{text}

| training | |
|---|---|
{training}

| on held-out text | bits per byte |
|---|---|
{results}

With the library flash_delta installed, transformers loads the model:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # of this page
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
```
"""


def require_no_other_page(folder: Path) -> None:
    """Refuses a folder that has a `README.md` which is no card of a run."""
    file = folder / FILE
    if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(HEAD):
        raise ValueError(f"out: expected a folder without a {FILE} of another kind than a run's card, got {file}")


def write_card(
    folder: str | Path,
    model: PreTrainedModel,
    settings: Settings,
    corpus: Summary,
    state: TrainerState,
    name: str | None = None,
) -> None:
    """Writes the card of a run anew. The card does not name the paths of the text. ``name``: None: the folder's."""
    text = {} if settings.paths else {"source": corpus.name}
    text |= {"files": f"{corpus.files:,}", "SHA-256": f"`{corpus.digest}`"}
    text |= {"bytes to train on": f"{corpus.train_bytes:,}", "bytes held out": f"{corpus.held_out_bytes:,}"}
    text |= {"tokens to train on": f"{corpus.train_tokens:,}", "tokens held out": f"{corpus.held_out_tokens:,}"}
    training = {"steps done": f"{state.global_step:,}"}
    training |= {name: value for name, value in asdict(settings).items() if name != "paths"}
    training["tokenizer"] = settings.tokenizer or "none: a token is a byte"
    last = [record for record in state.log_history if "eval_bits_per_byte" in record][-1:]
    results = {f"this model after step {record['step']:,}": f"{record['eval_bits_per_byte']:.3f}" for record in last}
    results["byte frequencies alone (order-0 entropy)"] = f"{corpus.entropy:.3f}"
    tables = {"text": text, "training": training, "results": results}
    facts = {name: "\n".join(f"| {what} | {value} |" for what, value in rows.items()) for name, rows in tables.items()}
    facts |= {"name": name or Path(folder).resolve().name, "mixers": ", ".join(dict.fromkeys(model.config.mixers))}
    card = HEAD + CARD.format(parameters=model.num_parameters(), **facts)
    Path(folder, FILE).write_text(card, encoding="utf-8")
