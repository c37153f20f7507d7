"""Write declarations of llama.h, mtmd.h and ggml's headers for ctypes: cllm/backend/llama/declarations.json.

python scripts/declarations.py           write it
python scripts/declarations.py --check   exit with 1 if it is not up to date

Only what cllm, bench, tests and proof name is declared (`api.llama_decode`), and structures passed by value.
A pointer to any other structure is a `void_p`. The headers are of the source that `cllm build` compiles.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cllm.build.toolchain import BINDINGS_VERSION, source_directory  # noqa: E402

TARGET = ROOT / "cllm" / "backend" / "llama" / "declarations.json"
EXTENSIONS = "src/llama-ext.h"  # its functions are exported under their C++ names
HEADERS = (
    "ggml/include/ggml.h",
    "ggml/include/ggml-alloc.h",
    "ggml/include/ggml-backend.h",
    "ggml/include/ggml-cpu.h",
    "include/llama.h",
    EXTENSIONS,
    "tools/mtmd/mtmd.h",
    "tools/mtmd/mtmd-helper.h",
)
SCALARS = {"bool", "char", "double", "float", "int", "size_t"}
SCALARS |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
TABLES = {
    "LLAMA_API": "functions",
    "GGML_API": "functions",
    "GGML_BACKEND_API": "cpu",
    "MTMD_API": "media",
}


def _mangle(name: str, parameters: str) -> str:
    """The C++ name of a function of pointers, booleans and numbers."""
    encoded = ""
    for parameter in parameters.split(","):
        *kind, _ = re.findall(r"\w+|\*", parameter.replace("struct", " "))
        pointer, base = "P" * kind.count("*") + "K" * kind.count("const"), kind[-1 - kind.count("*")]
        encoded += pointer + ({"bool": "b", "int32_t": "i"}.get(base) or f"{len(base)}{base}")
    return f"_Z{len(name)}{name}{encoded}"


class Headers:
    """What the headers declare, by name, as C text."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / EXTENSIONS).read_text(encoding="utf-8")
        self.extensions = frozenset(re.findall(r"^LLAMA_API[^;{}()]*?\b(\w+)\s*\(", lines, re.MULTILINE))
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
    """The declarations of the names that are used."""

    def __init__(self, headers: Headers, used: frozenset[str]) -> None:
        self._headers = headers
        self._used = used
        # In the order of their use: fields of a structure, or result and parameters of a callback.
        self._types: dict[str, dict[str, str] | list[str]] = {}

    def write(self) -> str:
        """JSON, with a line for each name."""
        headers = self._headers
        for name in sorted(self._used & (headers.structures.keys() | headers.callbacks.keys())):
            self._declare(name)
        tables: dict[str, dict[str, list[str]]] = {table: {} for table in TABLES.values()}
        for name in sorted(self._used & headers.functions.keys()):
            where, result, parameters = headers.functions[name]
            if name in headers.extensions:
                name = _mangle(name, parameters)
            tables[TABLES[where]][name] = self._signature(result, parameters)
        parts = [f'"source": "llama-cpp-python {BINDINGS_VERSION}"']
        for table, entries in ({"types": self._types} | tables).items():
            lines = [f'  "{name}": {json.dumps(entry)}' for name, entry in entries.items()]
            parts.append(f'"{table}": {{\n' + ",\n".join(lines) + "\n}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _declare(self, name: str) -> str:
        """Declare a structure or a callback, after the types that it is made of."""
        if name not in self._types:
            if name in self._headers.callbacks:
                self._types[name] = self._signature(*self._headers.callbacks[name])
            else:
                fields = filter(str.strip, self._headers.structures[name].split(";"))
                self._types[name] = dict(map(self._field, fields))
        return name

    def _field(self, text: str) -> tuple[str, str]:
        declared = re.fullmatch(r"(.*?)(\w+)\s*(?:\[(\w+)\])?\s*", text, re.DOTALL)
        assert declared is not None, text
        kind, name, size = declared.groups()
        found = self._type(kind)
        return name, f"{found}[{self._headers.constants.get(size, size)}]" if size else found

    def _signature(self, result: str, parameters: str) -> list[str]:
        kinds = [] if parameters.strip() in ("", "void") else parameters.split(",")
        named = [re.fullmatch(r"(.*?)(\w+)\s*", kind, re.DOTALL) for kind in kinds]
        return [self._type(result), *(self._type(match[1]) for match in named if match is not None)]

    def _type(self, text: str) -> str:
        """The name of a C type without the name that it declares."""
        words = re.findall(
            r"\w+|\*", re.sub("const|GGML_RESTRICT", " ", text).replace("unsigned char", "uint8_t")
        )
        stars = words.count("*")
        words = [word for word in words if word not in ("*", "struct")]
        if words[0] == "enum":
            return "*" * stars + "int"
        (name,) = words
        if name in ("void", "char") and stars:
            return "*" * (stars - 1) + f"{name}_p"
        if name == "void" or name in SCALARS:
            return "*" * stars + re.sub(r"(\d)_t$", r"\1", name)  # int32_t, but size_t
        structure = name in self._headers.structures
        if name in self._headers.callbacks or (structure and (name in self._used or not stars)):
            return "*" * stars + self._declare(name)
        if name in self._headers.aliases and not structure:
            return "*" * stars + self._type(self._headers.aliases[name])
        assert stars, f"{name} is passed by value and not declared"
        return "*" * (stars - 1) + "void_p"


@cache
def find_used() -> frozenset[str]:
    """The names of llama.h, mtmd.h and ggml that sources use, as attributes or by their names."""
    names: set[str] = set()
    for folder in ("cllm", "bench", "tests", "proof"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            names.update(re.findall(r"""[."']((?:llama|ggml|mtmd)_\w+)""", text))
    return frozenset(names)


def make_declarations(folder: Path) -> str:
    """The text of the file, from the headers below llama.cpp's folder."""
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
