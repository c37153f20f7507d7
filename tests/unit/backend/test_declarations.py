"""The declarations for ctypes are those of the headers, and lie in memory as the C compiler lays them out."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from pathlib import Path

import pytest

from cllm.backend.llama.library import DECLARED, Declarations, load
from cllm.build.toolchain import BuildError, find_compiler, source_directory
from scripts.declarations import HEADERS, TARGET, Headers, Writer, make_declarations

STRUCTURES = {name: found for name, found in DECLARED.types.items() if issubclass(found, ctypes.Structure)}


@pytest.fixture
def headers() -> Path:
    folder = source_directory() / "vendor" / "llama.cpp"
    if not folder.exists():
        pytest.skip("llama.cpp's source is not in the cache: `cllm build --fetch`")
    return folder


def test_the_file_is_what_the_headers_and_the_sources_give(headers: Path) -> None:
    assert TARGET.read_text() == make_declarations(headers), "run python scripts/declarations.py"


def test_sizes_and_offsets_are_those_of_the_compiler(headers: Path, tmp_path: Path) -> None:
    try:
        compiler = find_compiler(tmp_path, "gcc")
    except BuildError:
        pytest.skip("no C compiler is here")
    expected: list[str] = []
    included = ("<stddef.h>", "<stdio.h>", '"mtmd.h"', '"mtmd-helper.h"')
    lines = [*(f"#include {name}" for name in included), "int main(void) {"]
    for name, structure in STRUCTURES.items():
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field in structure._fields_:
            found = getattr(structure, field[0])
            expected.append(f"{name}.{field[0]} {found.offset} {found.size}")
            size = f"sizeof(((struct {name} *)0)->{field[0]})"
            lines.append(
                f'printf("{name}.{field[0]} %zu %zu\\n", offsetof(struct {name}, {field[0]}), {size});'
            )
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "return 0; }"]))
    folders = [f"-I{headers / name}" for name in ("include", "ggml/include", "tools/mtmd")]
    subprocess.run([*compiler.c, *folders, str(source), "-o", str(program)], check=True, timeout=60)
    printed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert len(expected) > 80
    assert printed.splitlines() == expected


def test_the_library_has_every_function() -> None:
    api = load().api
    for name in DECLARED.functions.keys() | DECLARED.cpu.keys():
        assert callable(getattr(api, re.sub(r"^_Z\d+|P13llama_context.*", "", name)))
    assert api.llama_context_default_params().n_batch == 2048, "a structure comes back by value"


def test_c_types_become_those_of_ctypes(tmp_path: Path) -> None:
    for name in HEADERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "include" / "llama.h").write_text("""
        #define SIZE 3
        typedef int32_t llama_token; // a comment; with a semicolon
        typedef struct llama_memory_i * llama_memory_t;
        typedef bool (*llama_callback)(float progress, void * user_data);
        enum llama_kind { A = 0, };
        struct llama_inner { llama_token tokens[SIZE]; };
        struct llama_outer { const char * name; struct llama_inner inner; const struct llama_unused * rest; };
        LLAMA_API struct llama_outer  llama_make(enum llama_kind k, llama_memory_t memory, llama_token ** t);
        LLAMA_API void llama_call(
            llama_callback callback, /* of
            two lines */ uint64_t count);
        LLAMA_API void llama_unused(void);
        GGML_BACKEND_API void * ggml_pool(void);
    """)
    (tmp_path / "tools" / "mtmd" / "mtmd.h").write_text("""
        typedef struct mtmd_bitmap mtmd_bitmap;
        MTMD_API mtmd_bitmap * mtmd_make(const unsigned char * data);
    """)
    written = Writer(
        Headers(tmp_path), frozenset({"llama_make", "llama_call", "ggml_pool", "mtmd_make"})
    ).write()
    declared = Declarations(json.loads(written))
    outer = declared.types["llama_outer"]
    assert issubclass(outer, ctypes.Structure)
    assert ctypes.sizeof(outer) == 32 and [field[0] for field in outer._fields_] == ["name", "inner", "rest"]
    tokens = ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
    assert declared.functions == {
        "llama_call": (None, declared.types["llama_callback"], ctypes.c_uint64),
        "llama_make": (outer, ctypes.c_int, ctypes.c_void_p, tokens),
    }
    assert declared.cpu == {"ggml_pool": (ctypes.c_void_p,)}
    pixels = ctypes.POINTER(ctypes.c_uint8)
    assert declared.media == {"mtmd_make": (ctypes.c_void_p, pixels)}, "an alias of its own name"
