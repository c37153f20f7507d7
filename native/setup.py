"""The wheel of cllm-native: any Python 3, one platform (`CLLM_PLATFORM`)."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class NativeDistribution(Distribution):
    """Libraries that setuptools has not compiled."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """They need no Python of their own."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", os.environ["CLLM_PLATFORM"]


setup(distclass=NativeDistribution, cmdclass={"bdist_wheel": PlatformWheel})
