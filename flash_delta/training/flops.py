"""The arithmetic that training a model needs, and the share of a device's peak that this is (MFU)."""

import torch
from transformers import PreTrainedModel

from flash_delta.models import FlashDeltaForCausalLM

# TFLOP/s of dense products in bfloat16, by NVIDIA's data sheets. Cards of other names (PCIe, NVL, slices) do less.
PEAKS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}


def flops_per_token(model: FlashDeltaForCausalLM, seq_len: int) -> float:
    """6 N + 6 H D T in each layer of softmax attention, as PaLM counts (arXiv:2204.02311, appendix B). Causal
    attention needs half of that paper's products.

    N: the parameters without the table of embeddings, which is no product. H, D: heads and their width. T: tokens of a
    window. What the delta rule computes beside its projections is left out, and so is all that runs twice.
    """
    config = model.config
    N = model.num_parameters() - (0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel())
    D = config.attention_head_dim or config.hidden_size // config.num_attention_heads
    return 6 * N + 6 * config.mixers.count("attention") * config.num_attention_heads * D * seq_len


def share_of_peak(model: PreTrainedModel, seq_len: int, device: torch.device, devices: int) -> float | None:
    """The share of all devices' peak that one token per second takes; None where peak or arithmetic is not known."""
    if device.type != "cuda" or not isinstance(model, FlashDeltaForCausalLM):
        return None
    peak = PEAKS.get(torch.cuda.get_device_name(device))
    return None if peak is None else flops_per_token(model, seq_len) / (devices * 1e12 * peak)
