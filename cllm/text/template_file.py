"""A chat template given by the operator, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import jinja2

from cllm.errors import ConfigError
from cllm.text.template import ChatTemplate, TemplateStopped

MOST_BYTES = 1 << 20


def read_template(given: str) -> str:
    """The template's text, from a file or given as it is (a path holds no braces). Raises ConfigError.

    Read once: a file that is changed or removed later cannot keep a process from being replaced.
    """
    if _is_template(given):
        return _checked(given, "the text given")
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"chat template {path}: over the limit of {MOST_BYTES} bytes")
        source = data.decode()
    except OSError as error:
        raise ConfigError(f"chat template {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat template {path}: not a text in UTF-8") from None
    if not _is_template(source):
        raise ConfigError(f"chat template {path}: it holds no Jinja: neither {{{{ nor {{%")
    return _checked(source, str(path))


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def _checked(source: str, name: str) -> str:
    try:
        ChatTemplate(source).check()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template {name}: line {error.lineno}: {error.message}") from None
    except TemplateStopped as error:
        raise ConfigError(f"chat template {name}: {error}") from None
    return source
