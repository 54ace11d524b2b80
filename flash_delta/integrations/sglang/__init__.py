"""The plugin for SGLang: its entry point is `register`."""

from flash_delta.integrations.sglang.plugin import register

__all__ = ["register"]
