"""The shape of a FlashDelta model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

MIXERS = ("gdn", "kda", "gdn2", "gdp", "delta_net", "attention")
# What transformers loads by `trust_remote_code=True` where nobody has imported `flash_delta.models`.
CLASSES = {
    "AutoConfig": "FlashDeltaConfig",
    "AutoModel": "FlashDeltaModel",
    "AutoModelForCausalLM": "FlashDeltaForCausalLM",
    "AutoModelForSequenceClassification": "FlashDeltaForSequenceClassification",
}
MODULE = "modeling_flash_delta"
CODE = f"""# The code of this model is in the library flash_delta, which has to be installed.
from flash_delta.models import {", ".join(CLASSES.values())}
"""


class FlashDeltaConfig(PreTrainedConfig):
    """Sizes of a decoder whose layers mix tokens by a delta rule (Gated DeltaNet and its kin) or softmax attention.

    Args:
        vocab_size: number of tokens. Default 32000.
        hidden_size: width of the residual stream. Default 1024.
        intermediate_size: width of the SwiGLU MLP; None means 8/3 hidden_size, rounded up to a multiple of 64.
        num_hidden_layers: number of blocks. Default 24.
        mixers: one of "gdn", "kda", "gdn2", "gdp", "delta_net", "attention" per block. None means that the next two
            arguments decide.
        mixer: the mixer of the blocks that are not attention. Default "gdn".
        attention_every: n, if every n-th block is softmax attention. None means that no block is.
        num_heads, num_v_heads, head_dim, expand_v, conv_size, allow_neg_eigval: as in `GatedDeltaNet`,
            `KimiDeltaAttention`, `GatedDeltaNet2` and `GatedDeltaProduct`. Defaults 8, None, 128, 1.0, 4, False.
            "delta_net" is a `DeltaNet` with num_heads such heads, also of values.
        num_householder: updates of the state per token in "gdp", which is `GatedDeltaProduct`. Default 2.
        use_forget_gate: whether the state of "gdp" decays. Default True.
        lower_bound: bound of KDA's log decay per token, in [-5, 0); None means the softplus gate.
        num_attention_heads, num_key_value_heads, attention_head_dim, rope_theta: as in `Attention`. Defaults 8, None
            (no groups), None (hidden_size / num_attention_heads), 10000.
        norm_eps: eps of every norm. Default 1e-5.
        tie_word_embeddings: whether the output layer is the embedding. Default False.
        initializer_range: standard deviation of fresh linear and embedding weights. Default 0.02.
        use_cache: whether inference returns a cache by default. Default True.
        backend: the backend of ops, convolutions and norms. Default None: each chooses.
        pad_token_id, bos_token_id, eos_token_id: as everywhere in transformers. Default None.

    Raises:
        ValueError: if the mixers are not named as above or not one per block, attention_every is not positive,
            lower_bound is given without a KDA layer to use it, or use_forget_gate is False without a "gdp" layer.

    Example:
        >>> from flash_delta.models import FlashDeltaConfig
        >>> config = FlashDeltaConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16, attention_every=2,
        ...     num_attention_heads=4,
        ... )
        >>> config.mixers
        ['gdn', 'attention']
    """

    model_type = "flash_delta"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 (Trainer adds it to a list)

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    mixers: list[str] | None = None
    mixer: str = "gdn"
    attention_every: int | None = None
    num_heads: int = 8
    num_v_heads: int | None = None
    head_dim: int = 128
    expand_v: float = 1.0
    conv_size: int = 4
    allow_neg_eigval: bool = False
    num_householder: int = 2
    use_forget_gate: bool = True
    lower_bound: float | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    attention_head_dim: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    backend: str | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        """Compute sizes that follow from others, and check all. kwargs are transformers' own common settings."""
        if self.attention_every is not None and self.attention_every < 1:
            raise ValueError(f"attention_every: expected a positive number or None, got {self.attention_every}")
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // (3 * 64)) * 64
        if self.mixers is None:
            period = self.attention_every
            self.mixers = [
                "attention" if period is not None and (layer + 1) % period == 0 else self.mixer
                for layer in range(self.num_hidden_layers)
            ]
        if unknown := sorted(set(self.mixers) - set(MIXERS)):
            raise ValueError(f"mixers: expected names among {list(MIXERS)}, got {unknown}")
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(f"mixers: expected one per layer, {self.num_hidden_layers}, got {len(self.mixers)}")
        if self.lower_bound is not None and "kda" not in self.mixers:
            raise ValueError(f"lower_bound: expected None without a 'kda' mixer, got {self.lower_bound}")
        if not self.use_forget_gate and "gdp" not in self.mixers:
            raise ValueError("use_forget_gate: expected True without a 'gdp' mixer, got False")
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write `config.json`, and beside it the file that `trust_remote_code=True` runs: it imports this library.

        kwargs are those of transformers.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
        self.auto_map = {auto: f"{MODULE}.{name}" for auto, name in CLASSES.items()}
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. transformers calls it so that `save_pretrained` copies the code, which stays in the library."""
