"""The wheel of cllm-native: any Python 3, one platform (`CLLM_PLATFORM`)."""

import os

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    """A wheel of libraries that need no Python of their own."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", os.environ["CLLM_PLATFORM"]


setup(cmdclass={"bdist_wheel": PlatformWheel})
