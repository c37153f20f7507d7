"""Write ctypes declarations of llama.h, mtmd.h and ggml's headers: cllm/backend/llama/declarations.py.

python scripts/declarations.py           write it
python scripts/declarations.py --check   exit with 1 if it is not up to date

Only what cllm, bench, tests and proof name is declared (`api.llama_decode`), and structures passed by value.
A pointer to any other structure is a `c_void_p`. The headers are of the source that `cllm build` compiles.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cllm.build.toolchain import BINDINGS_VERSION, source_directory  # noqa: E402

TARGET = ROOT / "cllm" / "backend" / "llama" / "declarations.py"
HEADERS = (
    "ggml/include/ggml.h",
    "ggml/include/ggml-alloc.h",
    "ggml/include/ggml-backend.h",
    "ggml/include/ggml-cpu.h",
    "include/llama.h",
    "tools/mtmd/mtmd.h",
    "tools/mtmd/mtmd-helper.h",
)
WIDTH = 110
SCALARS = {
    "bool": "c_bool",
    "char": "c_char",
    "double": "c_double",
    "float": "c_float",
    "int": "c_int",
    "size_t": "c_size_t",
    **{f"{sign}int{bits}_t": f"c_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
HEAD = '''\
"""Declarations of llama.h, mtmd.h and ggml's headers for ctypes: structures, callbacks and functions.

Written by scripts/declarations.py from llama.cpp's source in llama-cpp-python {version}. Do not edit.
"""

from __future__ import annotations

from ctypes import (
{imports}
)
from typing import Any
'''
TABLES = {
    "FUNCTIONS": "# Result and parameters of each.",
    "CPU_FUNCTIONS": "# The same, of the CPU's backend, which hands them out by their names.",
    "MEDIA_FUNCTIONS": "# The same, of libmtmd, which is loaded for models that take media.",
}
_TABLE_BY_API = {"GGML_BACKEND_API": "CPU_FUNCTIONS", "MTMD_API": "MEDIA_FUNCTIONS"}


class Headers:
    """What the headers declare, by name, as C text."""

    def __init__(self, folder: Path) -> None:
        text = "\n".join((folder / name).read_text(encoding="utf-8") for name in HEADERS)
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        self.constants = dict(re.findall(r"^\s*#\s*define\s+(\w+)\s+(\d+)\s*$", text, re.MULTILINE))
        text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.MULTILINE)
        self.structures = dict(re.findall(r"\bstruct\s+(\w+)\s*\{([^{}]*)\}", text))
        self.callbacks: dict[str, tuple[str, str]] = {
            name: (result, parameters)
            for result, name, parameters in re.findall(
                r"\btypedef\s+([^;{}()]*?)\(\s*\*\s*(\w+)\s*\)\s*\(([^;{}]*)\)\s*;", text
            )
        }
        self.aliases = {
            name: target.strip()
            for target, name in re.findall(r"\btypedef\s+([^;{}()]*?)\b(\w+)\s*;", text)
            if target.split()[-1] != name  # a structure of the same name
        }
        # name: where it is defined (a backend's functions are in its own library), result, parameters
        self.functions: dict[str, tuple[str, str, str]] = {
            name: (where, result, parameters)
            for where, result, name, parameters in re.findall(
                r"\b(LLAMA_API|GGML_API|GGML_BACKEND_API|MTMD_API)\s+([^;{}()]*?)\b(\w+)\s*\(([^;{}()]*)\)\s*;",
                text,
            )
        }


class Writer:
    """The Python text for the names that are used."""

    def __init__(self, headers: Headers, used: frozenset[str]) -> None:
        self._headers = headers
        self._used = used
        self._imports: set[str] = set()
        self._written: dict[str, str] = {}  # structures and callbacks in the order of their use
        self._tables: dict[str, list[str]] = {name: [] for name in TABLES}

    def write(self) -> str:
        headers = self._headers
        for name in sorted(self._used & headers.structures.keys()):
            self._structure(name)
        for name in sorted(self._used & headers.callbacks.keys()):
            self._callback(name)
        for name in sorted(self._used & headers.functions.keys()):
            where, result, parameters = headers.functions[name]
            table = _TABLE_BY_API.get(where, "FUNCTIONS")
            self._tables[table].append(_entry(name, self._signature(result, parameters)))
        imports = "\n".join(f"    {name}," for name in sorted(self._imports, key=_import_order))
        return HEAD.format(version=BINDINGS_VERSION, imports=imports) + "".join(self._layout())

    def _layout(self) -> Iterator[str]:
        """What is declared, with blank lines as ruff puts them."""
        before = ""
        for text in self._written.values():
            callbacks = not before.startswith("class") and before and not text.startswith("class")
            yield text if callbacks else f"\n\n{text}"
            before = text
        blank = "\n\n" if before.startswith("class") else "\n"
        for name, entries in self._tables.items():
            yield f"{blank}{TABLES[name]}\n{name}: dict[str, tuple[Any, ...]] = {{\n"
            yield "\n".join(entries) + "\n}\n"
            blank = ""

    def _structure(self, name: str) -> str:
        if name not in self._written:
            fields = [self._field(text) for text in self._headers.structures[name].split(";") if text.strip()]
            self._import("Structure")
            entries = [f'("{field}", {kind}),' for field, kind in fields]
            inner = "".join(f"\n        {entry}" for entry in entries) + "\n    "
            body = inner if len(entries) > 1 else entries[0]
            self._written[name] = f"class {name}(Structure):\n    _fields_ = ({body})\n"
        return name

    def _callback(self, name: str) -> str:
        if name not in self._written:
            result, parameters = self._headers.callbacks[name]
            signature = ", ".join(self._signature(result, parameters))
            self._written[name] = f"{name} = {self._import('CFUNCTYPE')}({signature})\n"
        return name

    def _field(self, text: str) -> tuple[str, str]:
        declared = re.fullmatch(r"(.*?)(\w+)\s*(?:\[(\w+)\])?\s*", text, re.DOTALL)
        assert declared is not None, text
        kind, name, size = declared.groups()
        found = self._type(kind)
        return name, f"{found} * {self._headers.constants.get(size, size)}" if size else found

    def _signature(self, result: str, parameters: str) -> list[str]:
        kinds = [] if parameters.strip() in ("", "void") else parameters.split(",")
        named = [re.fullmatch(r"(.*?)(\w+)\s*", kind, re.DOTALL) for kind in kinds]
        return [self._type(result), *(self._type(match[1]) for match in named if match is not None)]

    def _type(self, text: str) -> str:
        """The ctypes of a C type without the name that it declares."""
        words = re.findall(r"\w+|\*", text.replace("const", " ").replace("unsigned char", "uint8_t"))
        stars = words.count("*")
        words = [word for word in words if word not in ("*", "struct")]
        if words[0] == "enum":
            return self._point(self._import("c_int"), stars)
        (name,) = words
        if name == "void":
            return "None" if not stars else self._point(self._import("c_void_p"), stars - 1)
        if name == "char" and stars:
            return self._point(self._import("c_char_p"), stars - 1)
        if name in SCALARS:
            return self._point(self._import(SCALARS[name]), stars)
        if name in self._headers.callbacks:
            return self._point(self._callback(name), stars)
        if name in self._headers.structures and (name in self._used or not stars):
            return self._point(self._structure(name), stars)
        if name in self._headers.aliases and name not in self._headers.structures:
            return self._point(self._type(self._headers.aliases[name]), stars)
        assert stars, f"{name} is passed by value and not declared"
        return self._point(self._import("c_void_p"), stars - 1)

    def _point(self, kind: str, stars: int) -> str:
        for _ in range(stars):
            kind = f"{self._import('POINTER')}({kind})"
        return kind

    def _import(self, name: str) -> str:
        self._imports.add(name)
        return name


def _entry(name: str, signature: list[str]) -> str:
    """A line of a table, laid out as ruff does."""
    comma = "," if len(signature) == 1 else ""
    line = f'    "{name}": ({", ".join(signature)}{comma}),'
    if len(line) <= WIDTH:
        return line
    return f'    "{name}": (\n' + "".join(f"        {kind},\n" for kind in signature) + "    ),"


def _import_order(name: str) -> tuple[int, list[tuple[str, int]]]:
    """Constants, classes, functions, numbers by their value: as ruff sorts them."""
    parts = re.findall(r"([^\d]+)(\d*)", name)
    rank = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return rank, [(text, int(number or 0)) for text, number in parts]


@cache
def find_used() -> frozenset[str]:
    """The names of llama.h, mtmd.h and ggml that sources use, as attributes or by their names."""
    names: set[str] = set()
    for folder in ("cllm", "bench", "tests", "proof"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != TARGET:
                text = path.read_text(encoding="utf-8")
                names.update(re.findall(r"""[."']((?:llama|ggml|mtmd)_\w+)""", text))
    return frozenset(names)


def make_declarations(folder: Path) -> str:
    """The text of the module, from the headers below llama.cpp's folder."""
    return Writer(Headers(folder), find_used()).write()


def main(arguments: list[str]) -> int:
    folder = source_directory() / "vendor" / "llama.cpp"
    if not folder.exists():
        print(f"no source in {folder}: run `cllm build --fetch`", file=sys.stderr)
        return 1
    text = make_declarations(folder)
    if "--check" in arguments:
        if text != TARGET.read_text(encoding="utf-8"):
            print(f"{TARGET.name} is out of date: run python {sys.argv[0]}", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
