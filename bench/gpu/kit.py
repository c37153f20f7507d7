"""`python -m bench.gpu.kit FOLDER`: everything that a GPU machine without a network needs, in one folder.

On that machine, from this checkout: `sh FOLDER/build.sh` builds the library, llama-server and the GPU module
and packs them into FOLDER/built.tar.xz.*; `sh FOLDER/measure.sh OUT` measures what OUT does not have yet,
`sh FOLDER/media.sh` pictures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from bench.gpu.__main__ import VOCABULARY
from cllm.build.toolchain import source_directory
from tests.driver.corpus import vocabulary_files

MAX_BYTES = 60 << 20
ABSENT = ("numpy",)  # the machine has it
GLIBC = 39  # the minor version of the machine's: wheels for an older one run there, too
PLATFORMS = (
    "any",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in range(17, GLIBC + 1)),
)
NO_DEPENDENCIES = ("gguf", "tqdm", "pyyaml")  # of the package gguf: what it needs for reading and writing

ENVIRONMENT = """\
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
work=${WORK:-/tmp/cllm-gpu}
export CLLM_CACHE_DIR=$work/cache CC=gcc CXX=g++ PATH=$PATH:/usr/local/cuda/bin
mkdir -p "$CLLM_CACHE_DIR/source"
if [ ! -e "$work/python" ]; then
    python3 -m venv "$work/python"
    "$work/python/bin/pip" install -q --no-index --no-deps "$kit"/wheels/*.whl
    site=$("$work/python/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -c 'import numpy, os; print(os.path.dirname(os.path.dirname(numpy.__file__)))' > "$site/numpy.pth"
    tar xzf "$kit/source.tar.gz" -C "$CLLM_CACHE_DIR/source"
fi
if [ ! -e "$CLLM_CACHE_DIR/native" ] && [ -e "$kit/built.tar.xz.aa" ]; then
    cat "$kit"/built.tar.xz.* | xz -dc -T0 | tar x -C "$CLLM_CACHE_DIR"
fi
export PYTHONPATH=$PWD
python=$work/python/bin/python
"""
BUILD = """\
"$python" -m cllm build --with-server --media
"$python" -m cllm build --gpu cuda
rm -f "$kit"/built.tar.xz.*
tar c -C "$CLLM_CACHE_DIR" native | xz -T0 -3 | split -b 15000000 - "$kit/built.tar.xz."
"""
MEASURE = """\
built=$("$python" -m cllm build)
export GGML_BACKEND_PATH=$(ls "$CLLM_CACHE_DIR"/native/*cuda*/libggml-cuda.so)
out=$1; shift
exec "$python" -m bench.gpu "$out" --vocabulary "$kit/VOCABULARY" \\
    --llama-server "$built/bin/llama-server" "$@"
"""
MEDIA = """\
built=$("$python" -m cllm build)
export GGML_BACKEND_PATH=$(ls "$CLLM_CACHE_DIR"/native/*cuda*/libggml-cuda.so)
model=$work/random-0.6B.gguf
make='import sys; from pathlib import Path; from bench.gpu.models import make
make(Path(sys.argv[1]), "0.6B", Path(sys.argv[2]))'
[ -e "$model" ] || "$python" -c "$make" "$model" "$kit/VOCABULARY"
exec "$python" -m bench.media --gpu --model "$model" --llama-server "$built/bin/llama-server" "$@"
"""


def main(folder: Path, python: Annotated[str, typer.Option(help="That machine's Python")] = "3.12") -> None:
    """Pack the kit."""
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    needed = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [each for each in needed if not each.startswith((*ABSENT, "gguf"))]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = [*platforms, "--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
    _download(wheels, *target, *wanted)
    _download(wheels, *target, "--no-deps", *NO_DEPENDENCIES)
    source = source_directory()
    with tarfile.open(folder / "source.tar.gz", "w:gz", compresslevel=6) as tar:
        tar.add(source, source.name)
    shutil.copy(vocabulary_files()["qwen2"], folder / VOCABULARY)
    (folder / "build.sh").write_text(ENVIRONMENT + BUILD)
    for name, script in (("measure.sh", MEASURE), ("media.sh", MEDIA)):
        (folder / name).write_text(ENVIRONMENT + script.replace("VOCABULARY", VOCABULARY))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.0f} MiB", file=sys.stderr)
    if size > MAX_BYTES:
        sys.exit(f"that is over {MAX_BYTES >> 20} MiB")


def _download(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder), *arguments]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    typer.run(main)
