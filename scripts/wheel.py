"""Make the two wheels, dist/cllm-*.whl and dist/cllm_native-*.whl; the second for this architecture.

python scripts/wheel.py [--jobs N]   builds llama.cpp for every CPU first, unless that is in the cache

The platform's tag says the glibc that the libraries need: that of their newest symbol.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cllm.build.toolchain import source_directory  # noqa: E402

MAX_BYTES = 40 << 20
# The parts of glibc, and GCC's, which manylinux admits. Anything else has to be in the wheel.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|pthread|rt|gcc_s)\.so|ld-linux")
MAX_GCC = (4, 3)  # of manylinux2014


def read_elf(file: Path) -> tuple[set[str], set[str]]:
    """The libraries that a library needs, and the versions of their symbols."""
    shown = subprocess.run(["objdump", "-p", str(file)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"^\s*NEEDED\s+(\S+)", shown, re.MULTILINE))
    references = shown.partition("Version References:")[2]
    return needed, set(re.findall(r"^\s+0x\w+ 0x\w+ \d+ (\S+)", references, re.MULTILINE))


def platform_tag(files: list[Path]) -> str:
    """The tag for what these libraries need. Exits where that is more than glibc and themselves."""
    newest: tuple[int, ...] = (2, 17)  # of manylinux2014, which every installer knows
    names = {file.name for file in files}
    for file in files:
        needed, versions = read_elf(file)
        for library in needed - names:
            if not SYSTEM_LIBRARIES.match(library):
                sys.exit(f"{file.name} needs {library}, which is not in the wheel")
        for version in versions:
            name, _, number = version.partition("_")
            parts = tuple(map(int, number.split(".")[:2]))
            if name == "GLIBC":
                newest = max(newest, parts)
            elif name != "GCC" or parts > MAX_GCC:
                sys.exit(f"{file.name} needs {version}, which is not glibc's")
    return f"manylinux_{newest[0]}_{newest[1]}_{platform.machine()}"


def build_library(arguments: list[str]) -> Path:
    """The folder of the library for every CPU."""
    command = [sys.executable, "-m", "cllm.build.build", "--variants", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return Path(done.stdout.strip())


def make_wheel(project: Path, target: Path, **environment: str) -> Path:
    """Build the wheel of a project into a folder, and remove older ones of it."""
    shutil.rmtree(project / "build" / "lib", ignore_errors=True)  # or modules that are gone would come along
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-q"]
        subprocess.run([*command, "-w", scratch, str(project)], check=True, env={**os.environ, **environment})
        (wheel,) = Path(scratch).glob("*.whl")
        target.mkdir(exist_ok=True)
        for older in target.glob(f"{wheel.name.partition('-')[0]}-*.whl"):
            older.unlink()
        return Path(shutil.move(wheel, target / wheel.name))


def main(arguments: list[str]) -> int:
    library = build_library(arguments)
    files = sorted(library.glob("*.so"))
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(shutil.copytree(ROOT / "native", Path(scratch, "native")))
        for file in [*files, library / "build.json"]:
            shutil.copy(file, stage / "cllm_native")
        source = source_directory() / "vendor" / "llama.cpp"
        for licence in (source / "LICENSE", *(source / "licenses").glob("LICENSE*")):
            shutil.copy(licence, stage)
        shutil.copy(ROOT / "LICENSE", stage / "LICENSE-cllm")
        native = make_wheel(stage, ROOT / "dist", CLLM_PLATFORM=platform_tag(files))
    for wheel in (native, make_wheel(ROOT, ROOT / "dist")):
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 2**20:.1f} MiB", file=sys.stderr)
    if native.stat().st_size > MAX_BYTES:
        sys.exit(f"that is over {MAX_BYTES >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
