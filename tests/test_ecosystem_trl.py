"""trl trains our models. The development set is without it; `make newest` has it."""

import pytest
from tiny_model import SIZES, build, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's own name for it
def test_packed_fine_tuning(tmp_path):
    """trl gives the decoder, without its head, all that a collator makes of packed documents."""
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(SIZES["vocab_size"])}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    rows = [{"text": " ".join(f"w{token}" for token in tokens(n))} for n in (9, 4, 7, 12)]
    options = {"max_length": 16, "packing": True, "max_steps": 2, "learning_rate": 0.1, "save_strategy": "no"}
    options |= {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    model = build("hybrid").float()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = trl.SFTConfig(str(tmp_path), **options)
    data = datasets.Dataset.from_list(rows)
    trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer).train()
    assert all((parameter != before[name]).any() for name, parameter in model.named_parameters())
