"""Rows without a draft, without vLLM: its runner is a stand-in with the same names. tests/engines has the real one."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from flash_delta.integrations.vllm import pauses


class Runner:
    """A step of six rows: two drafts, two answers without a draft, a prompt's last token, and a whole prompt. One more
    row is padding. As in vLLM, numbers of draft tokens stay until the next step with drafts."""

    def __init__(self, drafts=True):
        self.speculative_config = SimpleNamespace() if drafts else None
        tokens = np.array([4, 1, 2, 1, 1, 9])
        self.query_start_loc = SimpleNamespace(np=np.array([0, *tokens.cumsum(), 0, 0]))
        self.input_batch = SimpleNamespace(
            num_computed_tokens_cpu=np.array([30, 20, 40, 99, 10, 0, 7]),
            num_prompt_tokens=np.array([20, 20, 39, 20, 11, 9, 7]),
        )
        self.num_decode_draft_tokens = SimpleNamespace(np=np.array([3, -1, 1, -1, -1, -1, -1]))

    def _build_attention_metadata(
        self, num_tokens, num_reqs, max_query_len, use_spec_decode=False, num_scheduled_tokens=None
    ):
        return use_spec_decode, self.num_decode_draft_tokens.np.tolist()


REQUESTS = {"num_tokens": 18, "num_reqs": 6, "max_query_len": 9, "num_scheduled_tokens": {"a": 4}}


@pytest.fixture
def runner(monkeypatch):
    """Returns a class of runners that is vLLM's own."""
    module, cls = ModuleType(pauses.RUNNER), type("GPUModelRunner", (Runner,), {})
    module.GPUModelRunner = cls
    monkeypatch.setitem(sys.modules, pauses.RUNNER, module)
    pauses.count_rows_without_drafts.cache_clear()
    yield cls
    pauses.count_rows_without_drafts.cache_clear()


def test_a_row_without_a_draft_is_a_draft_of_no_tokens(runner):
    for _ in range(2):  # of each process once
        pauses.count_rows_without_drafts("0.26.0")
    assert runner._build_attention_metadata.__wrapped__ is Runner._build_attention_metadata
    assert runner()._build_attention_metadata(**REQUESTS, use_spec_decode=True) == (True, [3, 1, 1, 1, -1, -1, -1])


def test_no_row_has_a_draft(runner):
    """The numbers of the step before are gone, also in rows that hold prompts now."""
    pauses.count_rows_without_drafts("0.26.0")
    step = runner()
    step.num_decode_draft_tokens.np[:] = 3
    step.query_start_loc.np = np.array([0, 1, 2, 3, 4, 5, 14, 0])
    assert step._build_attention_metadata(**REQUESTS, use_spec_decode=False) == (True, [1, 1, 1, 1, -1, -1, -1])


@pytest.mark.parametrize("drafts", [True, False])
def test_an_engine_without_drafts_and_a_trial_are_left_alone(runner, drafts):
    """A trial has no requests."""
    pauses.count_rows_without_drafts("0.26.0")
    given = REQUESTS | {"num_scheduled_tokens": None} if drafts else REQUESTS
    assert runner(drafts)._build_attention_metadata(**given) == (False, [3, -1, 1, -1, -1, -1, -1])


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1+cpu", "0.33.0", "1.0.0"])
def test_versions_that_count_these_rows_are_left_alone(runner, caplog, version):
    pauses.count_rows_without_drafts(version)
    assert runner._build_attention_metadata is Runner._build_attention_metadata
    assert not caplog.messages


@pytest.mark.parametrize("lacks", ["runner", "method", "argument"])
def test_a_version_where_this_cannot_be_mended_is_a_warning(runner, monkeypatch, caplog, lacks):
    if lacks == "runner":
        monkeypatch.delitem(sys.modules, pauses.RUNNER)
    if lacks == "method":
        monkeypatch.delattr(Runner, "_build_attention_metadata")
    if lacks == "argument":
        runner._build_attention_metadata = lambda self, num_reqs, num_scheduled_tokens: None
    before = getattr(runner, "_build_attention_metadata", None)
    with caplog.at_level(logging.WARNING, "vllm.flash_delta"):
        for _ in range(2):
            pauses.count_rows_without_drafts("0.27.1")
    (warning,) = caplog.messages
    assert "drafts are wrong in vLLM 0.27.1" in warning
    assert "a row without a draft" in warning
    assert getattr(runner, "_build_attention_metadata", None) is before
