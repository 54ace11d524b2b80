"""`trust_remote_code=True` loads our models where nobody has imported `flash_delta.models`."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import build, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import byte_tokenizer

FILES = {"config.json", "generation_config.json", "model.safetensors", "modeling_flash_delta.py"}
LOAD = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "flash_delta.models" not in sys.modules
AutoTokenizer.from_pretrained("model", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).eval()
with torch.no_grad():
    save_file({"logits": model(load_file("ids")["ids"]).logits}, "logits")
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
assert type(model) is FlashDeltaForCausalLM and type(model.config) is FlashDeltaConfig
model.save_pretrained("again")
"""
ASK = 'from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained("model")'


def in_a_process(code, folder):
    """Runs it without a terminal. The cache of modules is the folder's own."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.fixture(autouse=True)
def saved(tmp_path):
    build("hybrid").float().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")


@torch.no_grad()
def test_a_process_without_our_import(tmp_path):
    ids, here = tokens(2, 9), FlashDeltaForCausalLM.from_pretrained(tmp_path / "model").eval()
    save_file({"ids": ids}, tmp_path / "ids")
    out = in_a_process(LOAD, tmp_path)
    assert out.returncode == 0, out.stderr
    assert torch.equal(load_file(tmp_path / "logits")["logits"], here(ids).logits)
    assert {path.name for path in (tmp_path / "again").iterdir()} == FILES  # and no copy of the library's code
    for name in FILES - {"model.safetensors"}:
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "model" / name).read_text()


def test_code_runs_only_if_it_is_trusted(tmp_path):
    out = in_a_process(ASK, tmp_path)
    assert out.returncode != 0
    assert "`trust_remote_code=True`" in out.stderr


@pytest.mark.parametrize("trust", [None, False, True])
def test_the_library_runs_its_own_code(tmp_path, trust):
    """Where `flash_delta.models` is imported, nothing of the folder is run."""
    (tmp_path / "model/modeling_flash_delta.py").write_text("raise AssertionError")
    options = {} if trust is None else {"trust_remote_code": trust}
    assert type(AutoConfig.from_pretrained(tmp_path / "model", **options)) is FlashDeltaConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)) is FlashDeltaForCausalLM


def test_a_configuration_alone(tmp_path):
    """Every class that it names is in the file beside it."""
    FlashDeltaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "new" / "folder")
    names, classes = {}, json.loads((tmp_path / "new/folder/config.json").read_text())["auto_map"]
    exec((tmp_path / "new/folder/modeling_flash_delta.py").read_text(), names)
    assert {name.split(".")[0] for name in classes.values()} == {"modeling_flash_delta"}
    assert all(name.split(".")[1] in names for name in classes.values())
