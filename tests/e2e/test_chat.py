"""`cllm chat` on a terminal and in a pipe: every command, Ctrl-C, Ctrl-D, errors; `cllm run`."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cllm.cli.main import app
from cllm.testing import say
from tests.driver.server import Server, environment, wait_for
from tests.driver.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, TAB, Terminal
from tests.tiny_models import make_dense

PROMPT = ">>>"
STATS = "first token"
LONG = "one two three " * 30  # takes two seconds


def open_chat(server: Server, folder: Path, *script: str, **variables: str) -> Terminal:
    """A chat whose answers are those of the script, one after the other."""
    system = ("--system", say(*script)) if script else ()
    return Terminal("chat", "--url", server.url, *system, XDG_STATE_HOME=str(folder), **variables)


def ask(terminal: Terminal, question: str, answer: str) -> str:
    """Ask, wait for the answer and its line of figures; that line."""
    terminal.send(question)
    terminal.expect(answer)
    line = terminal.expect(STATS) + terminal.expect("context")
    terminal.expect(PROMPT)
    return line


def test_every_command(scripted: Server, tmp_path: Path) -> None:
    saved, notes, schema = tmp_path / "chat.json", tmp_path / "notes.txt", tmp_path / "schema.json"
    notes.write_text("the notes")
    schema.write_text('{"type": "object"}')
    with open_chat(scripted, tmp_path, "First answer", "Second answer", "Third answer") as terminal:
        terminal.expect(f"fake ({scripted.url}); /help lists the commands")
        terminal.expect(PROMPT)
        line = ask(terminal, "hello", "First answer")
        assert "12 tokens, " in line and "tokens/s" in line and "prompt tokens cached" in line
        ask(terminal, "and then?", "Second answer")

        def command(text: str, *said: str) -> None:
            terminal.send(text)
            for each in said:
                terminal.expect(each)
            terminal.expect(PROMPT)

        command("/stats", "fake", "2 questions, 2 answers, 25 tokens", "last")
        terminal.send("/retry")
        terminal.expect("Second answer")
        terminal.expect(PROMPT)
        command("/undo", "1 question left")
        command("/set", "all settings are the defaults")
        command("/set temperature 0.25", "temperature 0.25")
        command("/set temperature 99", "cllm: temperature is 99")
        command("/set tempratur 1", "did you mean 'temperature'?")
        command("/set max_tokens 4", "max_tokens 4")
        terminal.send("short")
        terminal.expect("Seco")
        terminal.expect("cut by the limit of tokens")
        terminal.expect(PROMPT)
        command("/set max_tokens", "temperature 0.25")
        command("/think hide", "reasoning is folded")
        command("/think sometimes", "say /think on, off or hide")
        command("/json", "any object")
        command(f"/json {schema}", "by the schema")
        command("/json {1", "cllm: this is no JSON schema")
        command("/json off", "answers are text")
        command(f"/file {notes}", "notes.txt, 9 characters")
        command(f"/file {tmp_path}", "Is a directory")
        ask(terminal, "what is in it?", "Third answer")
        command(f"/save {saved}", "3 questions")
        command("/clear", "all is forgotten")
        command("/retry", "cllm: there is no question yet")
        command("/undo", "cllm: there is no question to forget")
        command(f"/load {saved}", "3 questions")
        command(f"/load {notes}", "is no saved chat")
        command("/model", "* fake")
        command("/model other", "has no model 'other'; it serves: fake")
        command("/model FAKE:latest", "fake answers now")
        command("/system off", "there is no system prompt")
        command("/system Be brief.", "Be brief.")
        command("/nonsense", "there is no command 'nonsense'; /help lists them")
        names = "/system /set /think /file /json /retry /undo /save /load /bye"
        command("/help", *names.split())
        terminal.send("/bye")
        assert terminal.wait_closed() == 0
    chat = json.loads(saved.read_text())
    assert chat["messages"][-2] == {
        "role": "user",
        "content": "notes.txt:\n```\nthe notes\n```\n\nwhat is in it?",
    }
    assert chat["settings"] == {"temperature": 0.25} and chat["model"] == "fake"
    history = tmp_path / "cllm" / "chat_history"
    for private in (saved, history):
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert "+hello" in history.read_text()


def test_keys_and_failures(scripted: Server, tmp_path: Path) -> None:
    """Texts of several lines, completion, Ctrl-C, an error, and text that would control the terminal."""
    failing, wild = tmp_path / "failing.txt", tmp_path / "wild.txt"
    failing.write_text(say("begun", fails=True))
    wild.write_text(say("a\x1b]0;owned\x07b\x1b[2Jc\x9b1md\re"), newline="")
    with open_chat(scripted, tmp_path, "answer", "again", LONG, "short answer") as terminal:
        terminal.expect(PROMPT)
        terminal.type(f"one{ALT_ENTER}two\\{ENTER}three{ENTER}")
        terminal.expect(STATS)
        terminal.expect(PROMPT)
        terminal.type(f'"""four{ENTER}five"""{ENTER}')
        terminal.expect(STATS)
        terminal.expect(PROMPT)
        terminal.type(f"/sta{TAB}")
        terminal.expect("/stats")
        terminal.type(ENTER)
        terminal.expect("2 questions")
        terminal.expect(PROMPT)

        terminal.send("go")
        terminal.expect("one two")
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        terminal.expect(PROMPT)
        wait_for(scripted.idle)  # the server computes no more
        ask(terminal, "go on", "short answer")  # what there was of the answer counts
        terminal.send("/save " + str(tmp_path / "chat.json"))
        terminal.expect("saved")
        terminal.expect(PROMPT)

        terminal.send(f"/file {failing}")
        terminal.expect(PROMPT)
        terminal.send("fail")
        terminal.expect("begun")
        said = terminal.expect("/retry asks again")
        assert "cllm: " in said and "Traceback" not in said and "{" not in said
        terminal.expect(PROMPT)
        terminal.send(f"/file {wild}")
        terminal.expect(PROMPT)
        ask(terminal, "go wild", "a␛]0;owned␇b␛[2Jc")
        assert "\x1b]0;" not in terminal.raw and "\x1b[2Jc" not in terminal.raw and "d␍e" in terminal.text

        terminal.type("half a question" + CTRL_C)
        terminal.expect("Ctrl-C again")
        terminal.expect(PROMPT)
        terminal.type(CTRL_C)
        assert terminal.wait_closed() == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    asked = [each["content"] for each in messages if each["role"] == "user"]
    assert asked == ["one\ntwo\nthree", "four\nfive", "go", "go on"]


def pipe(text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from cllm.cli.main import main; main()", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**variables),
    )


def test_a_pipe_is_answered_once(scripted: Server) -> None:
    done = pipe(say("just this"), "chat", CLLM_URL=scripted.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "just this\n", "")
    empty = CliRunner().invoke(app, ["chat", "--url", scripted.url], input="")
    assert empty.exit_code == 2 and "no question" in empty.output


def test_run_answers_a_prompt_and_what_is_piped_to_it(scripted: Server) -> None:
    here = {"CLLM_URL": scripted.url}
    for text, arguments in (
        (say("piped"), ()),
        (say("piped"), ("-",)),
        (f"a long text {say('piped')}", ("Summarise this:",)),
        ("a long text", (say("piped"),)),
    ):
        done = pipe(text, "run", *arguments, **here)
        assert (done.returncode, done.stdout, done.stderr) == (0, "piped\n", "")
    binary = subprocess.run(
        [sys.executable, "-c", "from cllm.cli.main import main; main()", "run"],
        input=b"\x89PNG\xff", capture_output=True, timeout=60, env=environment(**here),
    )  # fmt: skip
    assert (binary.returncode, binary.stderr) == (2, b"cllm: standard input is no text in UTF-8\n")


@pytest.mark.parametrize("command", ["run PROMPT <&-", "run PROMPT </dev/null", "run - <&-", "chat <&-"])
def test_closed_standard_input_is_an_empty_one(scripted: Server, command: str) -> None:
    start = f"{sys.executable} -c 'from cllm.cli.main import main; main()' {command}"
    done = subprocess.run(
        ["sh", "-c", start.replace("PROMPT", '"$PROMPT"')], capture_output=True, text=True, timeout=60,
        env=environment(CLLM_URL=scripted.url, PROMPT=say("answered")),
    )  # fmt: skip
    if "PROMPT" in command:
        assert (done.returncode, done.stdout, done.stderr) == (0, "answered\n", "")
    else:
        assert done.returncode == 2 and done.stderr.startswith("cllm: there is no ")


def test_run_says_where_an_answer_was_cut(scripted: Server, tiny_model: Path) -> None:
    for source in (("--url", scripted.url), ("--local", "--model", str(tiny_model))):
        done = pipe("", "run", say("a long answer"), "--max-tokens", "3", *source)
        assert done.returncode == 0
        assert done.stderr == "cllm: the answer was cut at 3 tokens; --max-tokens N allows more\n"
    assert pipe("", "run", say("short"), "--url", scripted.url).stderr == ""


def test_run_without_a_prompt_says_how_to_give_one(scripted: Server) -> None:
    done = pipe("", "run", CLLM_URL=scripted.url)
    assert (done.returncode, done.stdout) == (2, "") and "there is no prompt: say `cllm run" in done.stderr


def test_run_uses_the_server_that_runs_and_says_which(scripted: Server) -> None:
    with Terminal("run", say("served"), CLLM_URL=scripted.url) as terminal:
        terminal.expect("served")
        terminal.expect(f"fake, {scripted.url}]")
        assert terminal.wait_closed() == 0
    with Terminal("run", say("served"), "--raw", CLLM_URL=scripted.url) as terminal:
        terminal.expect("served")
        assert terminal.wait_closed() == 0


def test_a_model_is_loaded_here(tmp_path: Path) -> None:
    model = make_dense(tmp_path / "dense.gguf", context=65536)  # no answer is through before it is stopped
    with Terminal(
        "chat", str(model), "--local", "--ctx-size", "65536", XDG_STATE_HOME=str(tmp_path)
    ) as terminal:
        terminal.expect("dense (loaded here)")
        terminal.expect(PROMPT)
        terminal.send("/set max_tokens 8")
        terminal.expect(PROMPT)
        terminal.send("hello")
        terminal.expect("8 tokens, ")
        terminal.expect("of 65,536")
        terminal.expect(PROMPT)
        terminal.send("/model /nonsense.gguf")
        terminal.expect("cllm: there is no model file")
        terminal.expect(PROMPT)
        terminal.send("/set max_tokens 65000")
        terminal.expect(PROMPT)
        terminal.send("again")
        terminal.expect("again\n")
        terminal.wait_output(20)
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait_closed() == 0


def test_run_says_tokens_a_second(tiny_model: Path) -> None:
    with Terminal("run", "hello", "--model", str(tiny_model), "--max-tokens", "99", "--raw") as terminal:
        line = terminal.expect("tokens/s")
        assert "[99 tokens, " in line
        assert terminal.wait_closed() == 0
