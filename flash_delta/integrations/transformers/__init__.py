"""Makes Gated DeltaNet and KDA models of Hugging Face transformers run on this library's ops, convolution and norm.

>>> from flash_delta.integrations import transformers as integration
>>> print(integration.enable())  # or: with integration.enable(): ...

Modelling code looks up its ops by their names in its module, in every call. :class:`enable` binds these names to our
ops and gives every gated norm class our forward, in imported modules at once and in other modules when they are
imported. So a model may be created before or after. The exception is a norm whose forward was already replaced (by
accelerate's hooks, with ``device_map``, or by hub kernels). It keeps that forward, and ``enable(model)`` refuses such a
model.

Layers whose source is known, all but those of Bailing-hybrid, run as one op between their projections
(:func:`flash_delta.ops.mix`), unless there is a cache, or hooks, sharded weights or a subclass want their own calls.

Models of transformers 5.17.0, 5.23.0 and 5.24.0, which are tested:

* Gated DeltaNet: Qwen3-Next, Qwen3.5 (dense and MoE), Qwen4-Exp, OLMo-hybrid, Lara-mini.
* Kimi Delta Attention: Kimi-Linear, GLM-5-Next, Bailing-hybrid.

``position_ids`` that restart at 0 keep the documents of packed rows apart, as ``DataCollatorWithFlattening`` makes
them. ``cu_seq_lens_q`` does this at less cost. Softmax attention of transformers separates documents only without a
cache and without ``attention_mask``. With either of them, a restart is refused on a CPU. On a GPU it is not noticed: a
row is one document there, as in the model's own code. If an op cannot run a call, the error names the argument. Nothing
falls back to the model's own code.

``generate`` takes ``assistant_model`` and ``prompt_lookup_num_tokens`` for all of these but Bailing-hybrid, GLM-5-Next,
and Qwen4-Exp in 5.17: up to 128 tokens of a cache that records its past can be cropped. A crop of other recurrent
states is refused.

For a row over many ranks, call ``model(input_ids=context.shard(row), cp_context=context)``. If the model has softmax
attention, first call ``model.set_attn_implementation("gathered_keys")``. Models with indexed attention (GLM-5-Next,
Qwen4-Exp) or a sliding window (Lara-mini) do not take ``cp_context``.

Threads: names are bound under a lock, for all threads at once. A forward pass that runs at this moment may call
some ops of the model and some of this library. Its results are right, because all layouts are the same, also those of
states.
"""

from flash_delta.integrations._report import Refused, Replaced
from flash_delta.integrations.transformers.enabling import disable, enable
from flash_delta.integrations.transformers.functions import CONVOLUTIONS, RULES

__all__ = ["CONVOLUTIONS", "RULES", "Refused", "Replaced", "disable", "enable"]
