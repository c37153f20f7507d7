"""Reference to a model of a hub: `hf:USER/REPO:QUANT@REVISION`, `ms:USER/REPO:QUANT`, or a pasted URL."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from cllm.errors import ConfigError
from cllm.names import is_file_path, is_repo, is_revision

_SHORT = re.compile(r"(hf|ms):(?://)?([^/:@]+/[^/:@]+)(?:/([^:@]+\.gguf))?(?::([^:@]+))?(?:@([^:@]+))?", re.I)
_HUGGING_FACE = {"huggingface.co", "www.huggingface.co", "hf.co"}
_MODELSCOPE = {"modelscope.cn", "www.modelscope.cn", "modelscope.ai", "www.modelscope.ai"}
_FORMS = "hf:USER/REPO, hf:USER/REPO:QUANT, ms:USER/REPO:QUANT, hf:USER/REPO:QUANT@REVISION"
_BRANCHES = ("main", "master")


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
    match = _SHORT.fullmatch(text)
    if match is None:
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
