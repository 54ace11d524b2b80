"""The plugin for vLLM: its entry point is `register`."""

from flash_delta.integrations.vllm.plugin import register

__all__ = ["register"]
