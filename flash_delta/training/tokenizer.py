"""Tokenizers of transformers. Without a name a token is a byte: any text can be read, and the vocabulary is 256."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT = 255  # no byte of UTF-8 has this value


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8, each with its own value. 255 is the end of a text."""
    signs = bytes_to_unicode() | {END_OF_TEXT: "<|endoftext|>"}
    tokenizer = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in signs.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=signs[END_OF_TEXT], split_special_tokens=True
    )  # a text that spells the end has bytes like any other


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of this name or in this folder; None: `byte_tokenizer`."""
    if name is None:
        return byte_tokenizer()
    if not name:
        raise ValueError(f"tokenizer: expected a name or a folder, got {name!r}")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the reasons are as many as there are kinds of tokenizers
        raise ValueError(f"tokenizer: expected one that transformers can load, got {name!r}: {error}") from error
