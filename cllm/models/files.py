"""Model files: a reference to a model of a hub, the files that make one model, and its quantisation."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from cllm.errors import ConfigError, ModelFileError
from cllm.names import is_file_path, is_repo, is_revision

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})$")
_SUFFIX = r"(?:_(?:0|1|2|4|8|K|XXS|XS|S|M|L|XL|NL))*"
_QUANT = re.compile(
    rf"(?<![A-Z0-9])((?:UD-)?(?:I|T)?Q\d{_SUFFIX}|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)(?![A-Z0-9])",
    re.IGNORECASE,
)
_MIXES = {" - Small": "_S", " - Medium": "_M", " - Large": "_L"}
# Files beside a model that are no model by themselves.
_COMPANION = re.compile(r"mmproj|imatrix|ggml-vocab|(^|[-_.])lora([-_.]|$)", re.IGNORECASE)
_TYPES = tomllib.loads(Path(__file__).with_name("types.toml").read_text(encoding="utf-8"))
PREFERRED: list[str] = _TYPES["preferred"]
FILE_TYPES: dict[str, int] = _TYPES["file_types"]
_SHORT = re.compile(r"(hf|ms):(?://)?([^/:@]+/[^/:@]+)(?:/([^:@]+\.gguf))?(?::([^:@]+))?(?:@([^:@]+))?", re.I)
_HUGGING_FACE = {"huggingface.co", "www.huggingface.co", "hf.co"}
_MODELSCOPE = {"modelscope.cn", "www.modelscope.cn", "modelscope.ai", "www.modelscope.ai"}
_FORMS = "hf:USER/REPO, hf:USER/REPO:QUANT, ms:USER/REPO:QUANT, hf:USER/REPO:QUANT@REVISION"
_BRANCHES = ("main", "master")


class HubFile(NamedTuple):
    """A file of a repository, as the hub's listing has it."""

    path: str
    size: int
    sha256: str = ""  # of the content; empty where the hub does not say
    git_oid: str = ""  # SHA-1 as git computes it, of a file that is in git itself

    @property
    def etag(self) -> str:
        """The hub's name of the content; the caches' name of the blob. Empty where it has none."""
        return self.sha256 or self.git_oid


class ModelFiles(NamedTuple):
    """The files of one model: one, or the parts of a split set in their order. Names are relative."""

    names: tuple[str, ...]
    size: int  # bytes, together
    parts: int  # as many as there should be

    @property
    def whole(self) -> bool:
        return len(self.names) == self.parts

    @property
    def stem(self) -> str:
        """The name without folder, number of the part and ending."""
        return _split(self.names[0])[0]

    @property
    def quant(self) -> str:
        return parse_quant(self.names[0])


def _split(name: str) -> tuple[str, int, int]:
    """The stem of a file name, the number of the part and how many there are."""
    stem = name.rpartition("/")[2].removesuffix(".gguf").removesuffix(".GGUF")
    match = _PART.match(stem)
    return (match[1], int(match[2]), int(match[3])) if match else (stem, 1, 1)


def parse_quant(name: str) -> str:
    """The quantisation that a file's name, or else its folder's, says; empty where none is."""
    for text in (_split(name)[0], name.rpartition("/")[0].rpartition("/")[2]):
        if found := _QUANT.findall(text):
            return str(found[-1]).upper().replace("FP16", "F16").replace("FP32", "F32")
    return ""


class FileType(NamedTuple):
    """How a model's weights are stored: `Q4_K - Medium`, as llama.cpp names it; `Q4_K_M`, as files do."""

    name: str = ""
    quant: str = ""


def parse_file_type(description: str) -> FileType:
    """That of llama.cpp's description of a loaded model, `llama 8B Q4_K - Medium`."""
    if (found := _QUANT.search(description)) is None:
        return FileType()
    quant, rest = found[1].upper(), description[found.end() :]
    if (quant, rest) != ("Q2_K", " - Medium"):  # its files are named Q2_K alone
        quant += _MIXES.get(rest, "")
    return FileType(found[1] + rest, quant)


def group_files(sizes: Mapping[str, int], wanted: str = "") -> list[ModelFiles]:
    """The models among files with their sizes; what is no GGUF is left out, and companions but `wanted`."""
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in sizes:
        folder, _, file = name.rpartition("/")
        if file.lower().endswith(".gguf") and (name == wanted or not _COMPANION.search(file)):
            stem, number, count = _split(file)
            found.setdefault((folder, stem, count), {})[number] = name
    models = []
    for (_, _, count), parts in sorted(found.items()):
        names = tuple(parts[number] for number in sorted(parts))
        models.append(ModelFiles(names, sum(sizes[name] for name in names), count))
    return models


def choose_files(models: Sequence[ModelFiles], wanted: str, where: str) -> ModelFiles:
    """The model of the wanted quantisation or file name; without one the first that is usual.

    Raises ModelFileError with what there is where none or several match.
    """
    if not models:
        raise ModelFileError(f"{where} has no GGUF file; `cllm search WORDS` finds a repository that has")
    found = _match(models, wanted) if wanted else _prefer(models)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelFileError(f"{where} has no {wanted}; it has {describe_files(models)}")
    names = ", ".join(model.names[0].rpartition("/")[2] for model in found)
    raise ModelFileError(f"{where} has several such models: {names}; name one by its file after the colon")


def _match(models: Sequence[ModelFiles], wanted: str) -> list[ModelFiles]:
    wanted = wanted.lower()
    stem = _split(wanted)[0]
    for test in (
        lambda model: wanted in (name.lower() for name in model.names),
        lambda model: model.stem.lower() == stem,
        lambda model: model.quant.lower() == wanted,
        lambda model: model.quant.lower() == f"ud-{wanted}",
    ):
        if found := [model for model in models if test(model)]:
            return found
    return _prefer([model for model in models if model.quant.lower().startswith(wanted)])


def _prefer(models: Sequence[ModelFiles]) -> list[ModelFiles]:
    for quant in PREFERRED:
        if found := [model for model in models if model.quant == quant]:
            return found
    return list(models)


def choose_mmproj(names: Iterable[str], model: str) -> list[str]:
    """The multimodal projector in the folder of a model, in half precision if there are several; or none."""
    folder = model.rpartition("/")[0]
    known = [name for name in names if re.search(r"mmproj[^/]*\.gguf$", name, re.IGNORECASE)]
    beside = [name for name in known if name.rpartition("/")[0] == folder and name != model]
    order = {"F16": 0, "BF16": 1, "Q8_0": 2}
    return sorted(beside, key=lambda name: (order.get(parse_quant(name), len(order)), name))[:1]


def describe_files(models: Iterable[ModelFiles]) -> str:
    """Quantisations with their sizes, the smallest first."""
    ordered = sorted(models, key=lambda model: model.size)
    return ", ".join(f"{model.quant or model.stem} ({format_size(model.size)})" for model in ordered)


def format_size(size: float) -> str:
    """Bytes as people read them, in powers of 1,000 as hubs show them."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit in ("B", "KB") or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_memory(size: float) -> str:
    """Bytes of memory in powers of 1,024, to three digits, as the page shows them."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}" if size < 100 else f"{size:,.0f} {units[0]}"


# References ----------------------------------------------------------------------------------------


class HubReference(NamedTuple):
    """A model of a hub. `quant` may be a file's name; what is empty is the hub's default."""

    hub: str  # hf or ms
    repo: str
    quant: str = ""
    revision: str = ""
    endpoint: str = ""  # of a mirror whose URL was pasted

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.hub}:{self.repo}{quant}" + (f"@{self.revision}" if self.revision else "")


def parse_hub(text: str) -> HubReference | None:
    """The hub reference that a text is; None for anything else. Raises ConfigError for a malformed one."""
    host = text.split("/", 1)[0].lower()
    if text.lower().startswith(("http://", "https://")):
        return _parse_url(text)
    if host in _HUGGING_FACE | _MODELSCOPE and "/" in text:
        return _parse_url(f"https://{text}")
    if not text.lower().startswith(("hf:", "ms:")):
        return None
    if (match := _SHORT.fullmatch(text)) is None:
        raise ConfigError(f"{text!r} is no reference to a model of a hub; they look like {_FORMS}")
    hub, repo, file, quant, revision = match.groups()
    return _check(HubReference(hub.lower(), repo, quant or file or "", revision or ""), text)


def _check(reference: HubReference, text: str) -> HubReference:
    """The reference. Raises ConfigError where a part of it could not be one on any hub."""
    if not is_repo(reference.repo):
        raise ConfigError(f"{text!r} names no repository of a hub; references look like {_FORMS}")
    if reference.revision and not is_revision(reference.revision):
        raise ConfigError(
            f"{text!r}: {reference.revision!r} can be no branch, tag or commit; name one of the repository's"
        )
    if reference.quant and not is_file_path(reference.quant):
        raise ConfigError(f"{text!r}: {reference.quant!r} can be no quantisation or file of a repository")
    return reference


def _parse_url(text: str) -> HubReference:
    """A page, a file or a folder of a repository."""
    try:
        address = urlsplit(text)
        host = (address.hostname or "").lower()
    except ValueError:
        raise ConfigError(f"{text!r} is no valid URL") from None
    words = [unquote(word) for word in address.path.split("/") if word]
    modelscope = host in _MODELSCOPE | {_host("MODELSCOPE_ENDPOINT")}
    if modelscope and words[:1] == ["models"]:
        words = words[1:]
    repo, quant = "/".join(words[:2]), ""
    if ":" in repo:  # hf.co/USER/REPO:QUANT, as Ollama has it
        repo, _, quant = repo.partition(":")
    kind, rest = (words[2] if len(words) > 2 else ""), words[3:]
    file = rest[-1] if rest and rest[-1].lower().endswith(".gguf") else ""
    known = modelscope or host in _HUGGING_FACE | {_host("HF_ENDPOINT")}
    mirror = kind in ("blob", "resolve", "raw") and bool(file)
    wrong = repo.count("/") != 1 or words[0] in ("datasets", "spaces", "api")
    if wrong or not (known or mirror):
        raise ConfigError(
            f"{text!r} is no page of a model on a hub; copy the address of the repository or of a .gguf file"
        )
    named = kind in ("blob", "resolve", "raw", "tree") and bool(rest)
    revision = rest[0] if named and rest[0] not in _BRANCHES else ""
    path = "/".join(rest[1:]) if named and file else file
    endpoint = "" if known else f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
    return _check(HubReference("ms" if modelscope else "hf", repo, path or quant, revision, endpoint), text)


def _host(variable: str) -> str:
    return (urlsplit(os.environ.get(variable, "")).hostname or "").lower()
