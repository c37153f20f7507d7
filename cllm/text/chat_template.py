"""Chat template of a model: untrusted Jinja code, rendered in a sandbox with time and size limits.

Three protections. Jinja's sandbox keeps a template away from Python's internals. The environment here adds
limits while it renders: each block checks the clock; output and concatenations are bounded. What no check can
stop (one endless native operation) is ended by `deadly_guard`, which ends the process: for the tokenizer
worker alone, which is made to be restarted.
"""

from __future__ import annotations

import ctypes
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cllm.config import TEMPLATE_TEXT
from cllm.errors import ConfigError, InvalidRequest

RENDER_LIMIT_S = 2.0  # CPU time, of which a shared machine takes some; below the guard's: an error, no kill
GUARD_LIMIT_S = 2.5
MAX_ADDED = 1 << 20  # characters of output beyond those of the messages
MAX_SOURCE = 1 << 20  # characters of the template itself, bytes of its file
MAX_ITEMS = 1 << 20  # of a list or text after multiplication
MAX_BITS = 4096  # of a power

TICKS = 32  # blocks and operations between two reads of the clock

Guard = Callable[[], AbstractContextManager[None]]
# Filters that can make a large output of a small input and that no chat template needs.
_REMOVED = "center filesizeformat pprint random striptags urlencode urlize wordwrap xmlattr"


class TemplateStopped(Exception):
    """The template exceeded a limit; the message names it."""


class TemplateRefused(InvalidRequest):
    """The template raised an error on these messages; it may take them in another shape."""


_libc = ctypes.CDLL(None)


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`: which signal a timer sends. Zeros mean a signal to the process."""

    _fields_ = (("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_int * 13))


class _TimerTimes(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds, of the interval and until the signal."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "s", "ns"))


@contextmanager
def deadly_guard(limit_s: float = GUARD_LIMIT_S, number: int = signal.SIGPROF) -> Iterator[None]:
    """End this process by a signal after `limit_s` of CPU time of this thread, even inside a native call.

    Where threads have no timer of their own (macOS), the CPU time of all threads counts.
    """
    timer = ctypes.c_void_p()
    event = _SignalEvent(signal=number)
    times = _TimerTimes(s=int(limit_s), ns=int(limit_s % 1 * 1e9))
    arguments = getattr(time, "CLOCK_THREAD_CPUTIME_ID", 0), ctypes.byref(event), ctypes.byref(timer)
    if made := hasattr(_libc, "timer_create") and not _libc.timer_create(*arguments):
        _libc.timer_settime(timer, 0, ctypes.byref(times), None)
    else:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        _libc.timer_delete(timer) if made else signal.setitimer(signal.ITIMER_PROF, 0)


class ChatTemplate:
    """One chat template, compiled on first use: a malformed one affects chat requests only."""

    def __init__(self, source: str, guard: Guard = nullcontext) -> None:
        self.source = source
        self._guard = guard
        self._lock = threading.Lock()  # the environment counts for one render at a time

    def render(self, /, **variables: Any) -> str:
        """Render the template. Raises TemplateRefused for its own errors, InvalidRequest for others."""
        try:
            with self._lock, self._guard():
                return self._environment.run(self._compiled, variables)
        except TemplateStopped as error:
            kind, reason = InvalidRequest, f"was stopped: {error}"
        except jinja2.TemplateSyntaxError as error:
            kind, reason = InvalidRequest, f"cannot be used: line {error.lineno}: {error.message}"
        except jinja2.TemplateError as error:
            kind, reason = TemplateRefused, f"refuses these messages: {error.message}"
        except Exception as error:  # a template can raise anything
            kind, reason = TemplateRefused, f"failed on these messages ({type(error).__name__})"
        raise kind(f"the model's chat template {reason}", field="messages")

    @cached_property
    def _environment(self) -> _Environment:
        return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=(LoopControls, GenerationTag))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE:
            raise TemplateStopped(f"it has {len(self.source)} characters, the limit is {MAX_SOURCE}")
        return self._environment.from_string(self.source)


class _CountingGenerator(CodeGenerator):
    """Compiles a template to code that checks the limits at each block and folds no constants."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # expressions are evaluated while rendering, under the limits
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja sandbox with limits and the helpers that published templates expect. One render at a time."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        for name in _REMOVED.split():
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._started = 0.0
        self._ticks = self._max_length = 0

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render within the limits. Raises TemplateStopped, and what the template itself raises."""
        self._started = time.thread_time()
        # Twice: JSON may escape a character with two.
        self._max_length = MAX_ADDED + 2 * len(repr(variables))
        parts: list[str] = []
        length = 0
        for part in template.generate(dict(variables)):
            parts.append(part)
            length += len(part)
            if length > self._max_length:
                raise TemplateStopped(f"it makes more than {self._max_length} characters of these messages")
        return "".join(parts)

    def tick(self) -> None:
        """Check the CPU time every TICKS calls (reading it is slow). Templates call this at each block."""
        self._ticks += 1
        if self._ticks % TICKS == 0 and time.thread_time() - self._started > RENDER_LIMIT_S:
            raise TemplateStopped(f"it computes for more than {RENDER_LIMIT_S:g} s")

    def joined(self, parts: Sequence[Any]) -> str:
        """Concatenate: `a ~ b`."""
        texts = [str(part) for part in parts]
        self._check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "+" and len(sized) == 2:
            self._check_length(len(left) + len(right))
        elif operator == "*" and sized:
            count = left if isinstance(left, int) else right
            if isinstance(count, int) and len(sized[0]) * count > MAX_ITEMS:
                raise TemplateStopped(f"it multiplies to more than {MAX_ITEMS} items")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise TemplateStopped(f"it computes numbers of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("the % operator on text is not supported: use ~ or format")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Templates may build lists of their own: what they are given is theirs alone."""
        changes_list = isinstance(obj, list) and attr in ("append", "pop")
        return changes_list or super().is_safe_attribute(obj, attr, value)

    def _check_length(self, length: int) -> None:
        if length > self._max_length:
            raise TemplateStopped(f"it makes a text of more than {self._max_length} characters")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks assistant text for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes; arguments in the order of Transformers."""
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.TemplateError("tojson: indent must be between 0 and 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def read_template(given: str) -> str:
    """The source of a template: a built-in name's, a file's, or the text itself. Raises ConfigError.

    Text is what has Jinja in it, or `text:` before it.

    Read once: a file that changes or disappears later cannot fail the restart of a worker.
    """
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given]
    name, source = "(inline)", given.removeprefix(TEMPLATE_TEXT)
    try:
        if source == given and not _is_template(given):
            path = Path(given).expanduser()
            name = str(path)
            with path.open("rb") as file:
                data = file.read(MAX_SOURCE + 1)
            if len(data) > MAX_SOURCE:
                raise ConfigError(f"chat template {name}: larger than the limit of {MAX_SOURCE} bytes")
            source = data.decode()
            if not _is_template(source):
                raise ConfigError(f"chat template {name}: no Jinja in it: neither {{{{ nor {{%")
        _ = ChatTemplate(source)._compiled
    except OSError as error:
        reason = error.strerror or str(error)
        if len(path.parts) == 1:
            reason += f"; built-in ones are {', '.join(BUILTIN_TEMPLATES)}"
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except TemplateStopped as error:
        reason = str(error)
    else:
        return source
    raise ConfigError(f"chat template {name}: {reason}")


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


# Built-in templates, by llama.cpp's names for them: for models that carry none ------------------------------


class Turns(msgspec.Struct, frozen=True):
    """Texts around each message. System text belongs to the turn of the user after it."""

    system: str
    user: str
    assistant: str
    opening: str = ""  # of the answer
    begin: str = ""  # before a system or user message that begins a turn
    trim: bool = False

    def template(self) -> str:
        """As Jinja."""
        text = "message.content | trim" if self.trim else "message.content"

        def write(form: str) -> str:
            before, after = form.split("{}")
            return f"{{{{ {json.dumps(before)} ~ ({text}) ~ {json.dumps(after)} }}}}"

        return (
            "{% set turn = namespace(open=false) %}{% for message in messages %}"
            "{% if message.role == 'assistant' %}" + write(self.assistant) + "{% else %}"
            f"{{% if not turn.open %}}{{{{ {json.dumps(self.begin)} }}}}{{% endif %}}"
            "{% set turn.open = message.role == 'system' %}"
            "{% if turn.open %}" + write(self.system) + "{% else %}" + write(self.user) + "{% endif %}"
            "{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {json.dumps(self.opening)} }}}}{{% endif %}}"
        )


_FILE = Path(__file__).with_name("templates.toml").read_bytes()
_TURNS = msgspec.toml.decode(_FILE, type=dict[str, Turns])
BUILTIN_TEMPLATES = {name: turns.template() for name, turns in _TURNS.items()}
