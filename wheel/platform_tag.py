"""A step of the build of the wheel."""

import platform
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformTag(BuildHookInterface):
    """Names the systems that can load the C module: any Python, and this processor with glibc 2.17 or newer."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data |= {"pure_python": False, "tag": f"py3-none-manylinux_2_17_{platform.machine()}"}
