"""Pictures and sound in chats, over HTTP, on tiny models with an mmproj."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from cllm.backend.llama.library import load
from cllm.backend.llama.media import Part, PromptText
from cllm.errors import InvalidRequest, LibraryError
from cllm.llm import LLM
from cllm.workers.media import decode_picture
from tests.driver.engine import StepDriver
from tests.driver.media import (
    encode_all,
    make_file,
    make_sound,
    make_text,
    make_url,
    open_encoder,
    open_media_runner,
)
from tests.driver.runner import GREEDY
from tests.driver.same_text import EXACT
from tests.driver.server import Server, StartServer, cllm, make_client, stream_text, wait_for
from tests.tiny_media import MAKERS, MediaModel, make_causal, make_hearing
from tests.unit.workers.test_media import HOSTILE

CHAT = "/v1/chat/completions"
ROWS = 16  # of a picture


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    try:
        load().load_media()
    except LibraryError as error:
        pytest.skip(str(error))
    made = make_causal(tmp_path_factory.mktemp("pictures"))
    return made._replace(mmproj=made.mmproj.rename(made.mmproj.with_name("mmproj-tiny.gguf")))


@pytest.fixture(scope="module")
def seeing(files: MediaModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that finds the mmproj beside its model."""
    log = tmp_path_factory.mktemp("seeing") / "log"
    with Server(log, str(files.model), "--parallel", "4", "--ctx-size", "4096", *EXACT) as server:
        yield server


def show(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": make_url(data)}}


def ask(text: str, *files: bytes) -> dict[str, Any]:
    return {"role": "user", "content": [*map(show, files), {"type": "text", "text": text}]}


def body(*messages: dict[str, Any], max_tokens: int | None = 12, **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}


def answer(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    found = server.post(CHAT, body(*messages, **fields))
    assert found.status_code == 200, found.text
    return dict(found.json())


def text_of(found: dict[str, Any]) -> str:
    return str(found["choices"][0]["message"]["content"])


def count(server: Server, source: str) -> float:
    return server.metrics().get(f"cllm_pictures_total{{source={source}}}", 0.0)


def compute_alone(server: Server, files: MediaModel, question: Any, file: bytes) -> tuple[str, int]:
    """The text that the bare engine answers to llama.cpp's own prompt, and the length of that."""
    template = server.post("/apply-template", {"messages": [question]}).json()["prompt"]
    before, _, after = template.partition("[picture-")
    parts: list[Part] = [
        PromptText(before, parse_special=True),
        decode_picture(file),
        PromptText(after.partition("]")[2], parse_special=True),
    ]
    with open_encoder(files) as encoder, encoder.tokenize(parts) as tokenized:
        prompt, rows = tokenized.prompt, encode_all(encoder, tokenized)
    driver = StepDriver(open_media_runner(files))
    name = driver.add_media(prompt, rows, 12, sampling=GREEDY)
    text = driver.finish()[name].text
    driver.runner.close()
    return text, len(prompt)


def test_openai_sdk_answers_as_the_engine_alone(seeing: Server, files: MediaModel) -> None:
    question: Any = ask("What is this?", make_file(1))
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="x") as client:
        answers = [
            client.chat.completions.create(model="m", messages=[question], max_tokens=12, temperature=0)
            for _ in range(2)
        ]
    texts = [each.choices[0].message.content for each in answers]
    expected, length = compute_alone(seeing, files, question, make_file(1))
    assert texts == [expected, expected]
    assert answers[0].usage is not None and answers[0].usage.prompt_tokens == length
    other = text_of(answer(seeing, ask("What is this?", make_file(2))))
    assert other != expected, "pictures are seen"


def test_a_picture_is_encoded_once_and_turns_compute_what_is_new(seeing: Server) -> None:
    encoded, cached = count(seeing, "encoded"), count(seeing, "cache")
    question = ask("Look at it.", make_file(10))
    first = answer(seeing, question)
    said = {"role": "assistant", "content": text_of(first)}
    second = answer(seeing, question, said, {"role": "user", "content": "And?"})
    assert count(seeing, "encoded") == encoded + 1 and count(seeing, "cache") == cached + 1
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused >= first["usage"]["prompt_tokens"]
    with ThreadPoolExecutor(4) as pool:
        texts = set(pool.map(lambda _: text_of(answer(seeing, question)), range(4)))
    assert texts == {text_of(first)} and count(seeing, "encoded") == encoded + 1


def test_every_api_takes_a_picture(seeing: Server) -> None:
    data = make_file(3)
    encoded = make_text(data)
    source: Any = {"type": "base64", "media_type": "image/png", "data": encoded}
    lengths = {answer(seeing, ask("What?", data))["usage"]["prompt_tokens"]}
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="x") as client:
        parts: Any = [
            {"type": "input_image", "image_url": make_url(data), "detail": "auto"},
            {"type": "input_text", "text": "What?"},
        ]
        given: Any = [{"role": "user", "content": parts}]
        made = client.responses.create(model="m", input=given, max_output_tokens=4, temperature=0)
        assert made.usage is not None
        lengths.add(made.usage.input_tokens)
    with anthropic.Anthropic(base_url=seeing.url, api_key="x") as claude:
        image: Any = {"type": "image", "source": source}
        messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
        usage = claude.messages.create(model="m", max_tokens=4, messages=messages).usage
        lengths.add(usage.input_tokens + (usage.cache_read_input_tokens or 0))
        lengths.add(claude.messages.count_tokens(model="m", messages=messages).input_tokens)
        call: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [image]}
        talk: Any = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        result["content"] = "x"
        plain = claude.messages.count_tokens(model="m", messages=talk).input_tokens
        result["content"] = [image]
        seen = claude.messages.count_tokens(model="m", messages=talk).input_tokens
        assert seen == plain - 1 + ROWS, "a picture in the result of a tool"
    assert len(lengths) == 1
    asked: Any = [{"role": "user", "content": "What?", "images": [encoded]}]
    with ollama.Client(seeing.url, trust_env=False) as llama:
        for found in (
            llama.chat("m", asked, options={"num_predict": 4}),
            llama.generate("m", "What?", images=[encoded], options={"num_predict": 4}),
        ):
            assert found.prompt_eval_count in lengths


def test_rows_outlive_a_server_until_they_are_cleared(files: MediaModel, tmp_path: Path) -> None:
    question = ask("Look at it.", make_file(30))
    options = f"--parallel 1 --cache-dir {tmp_path} --cache-disk-mb 64".split()
    flags = (str(files.model), *options, *EXACT)
    with Server(tmp_path / "first", *flags) as server:
        before = text_of(answer(server, question))
    with Server(tmp_path / "second", *flags) as server:
        assert text_of(answer(server, question)) == before and count(server, "encoded") == 0
        assert server.post("/admin/cache/clear", {}).status_code == 200
        wait_for(lambda: not list(tmp_path.glob("kv/*/*")))  # the media worker is told, not asked
        assert text_of(answer(server, question)) == before and count(server, "encoded") == 1


def test_a_raw_prompt_takes_pictures(seeing: Server) -> None:
    marker = seeing.get("/props")["media_marker"]
    question = ask("What is this?", make_file(1))
    template = seeing.post("/apply-template", {"messages": [question]}).json()["prompt"]
    before, _, after = template.partition("[picture-")
    text = before + marker + after.partition("]")[2]
    prompt = {"prompt_string": text, "multimodal_data": [make_text(make_file(1))]}
    found = seeing.post("/completion", {"prompt": prompt, "n_predict": 12, "temperature": 0})
    assert found.status_code == 200, found.text
    assert found.json()["content"] == text_of(answer(seeing, question))
    none = {"prompt": {**prompt, "prompt_string": "?"}}
    assert "for 1 pictures; write one for each" in seeing.post("/completion", none).json()["error"]["message"]


def test_modalities_and_capabilities_are_shown(seeing: Server, tiny: Server) -> None:
    assert seeing.get("/props")["modalities"]["vision"] and not tiny.get("/props")["modalities"]["vision"]
    assert "vision" in seeing.get("/v1/models")["data"][0]["capabilities"]
    assert "vision" not in tiny.get("/v1/models")["data"][0]["capabilities"]


@pytest.mark.parametrize("name", [*HOSTILE, "empty", "remote", "no base64", "too many", "not encoded"])
def test_a_bad_picture_is_a_400_that_says_why(seeing: Server, name: str) -> None:
    data, reason = HOSTILE.get(name, (b"x", ""))
    message = ask("What?", data)
    if name == "empty":
        message, reason = ask("What?", b""), "has no picture"
    elif name == "remote":
        message["content"][0]["image_url"]["url"] = "http://localhost/cat.png"
        reason = "fetches nothing: send the picture itself"
    elif name == "no base64":
        message["content"][0]["image_url"]["url"] = "data:image/png;base64,%%%"
        reason = "picture 1 is not valid base64"
    elif name == "not encoded":
        message["content"][0]["image_url"]["url"] = "data:image/png,abc"
        reason = "must end its head with ;base64"
    elif name == "too many":
        message, reason = ask("What?", *[make_file()] * 33), "33 pictures, the limit is 32"
    found = seeing.post(CHAT, body(message))
    assert found.status_code == 400 and reason in found.json()["error"]["message"], found.text


def test_a_model_without_mmproj_refuses_pictures(tiny: Server) -> None:
    found = tiny.post(CHAT, body(ask("What?", make_file())))
    assert found.status_code == 400 and "accepts text only" in found.json()["error"]["message"]


def test_a_killed_media_worker_disturbs_no_stream(seeing: Server) -> None:
    expected = seeing.generate("a stream beside it", 300)["text"]
    question = ask("And this?", make_file(20))
    before = text_of(answer(seeing, question))
    with seeing.open_stream("a stream beside it", 300) as events, ThreadPoolExecutor(1) as pool:
        said = [next(events)]
        os.kill(seeing.child("media"), signal.SIGSTOP)
        asked = pool.submit(answer, seeing, question)
        said.append(next(events))
        seeing.kill_worker("media")
        said += events
        assert text_of(asked.result()) == before
    assert stream_text(said) == expected
    seeing.kill_worker("engine")
    assert text_of(answer(seeing, question)) == before


def test_an_answer_to_a_picture_outlives_its_engine(seeing: Server) -> None:
    question = ask("Go on and on.", make_file(21))
    alone = text_of(answer(seeing, question, max_tokens=400))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, seeing, question, max_tokens=400)
        while not asked.done() and not seeing.get("/debug/kv")["leases"]:
            pass
        seeing.kill_worker("engine")
        assert text_of(asked.result()) == alone


def test_no_mmproj_leaves_pictures_out(files: MediaModel, tmp_path: Path) -> None:
    with Server(tmp_path / "log", str(files.model), "--no-mmproj", "--parallel", "1") as server:
        assert not server.get("/props")["modalities"]["vision"]


def test_the_python_api_takes_bytes_paths_and_images(
    seeing: Server, files: MediaModel, tmp_path: Path
) -> None:
    def show_any(image: Any) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": image}
        return {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}

    path = tmp_path / "picture.png"
    path.write_bytes(make_file(1))
    images = [make_file(1), path, {"url": path}, Image.open(path)]
    exact = {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(files.model, parallel=1, ctx_size=1024, threads=1, cache_disk_mb=0, **exact) as llm:
        texts = [llm.chat([show_any(each)], max_tokens=12, temperature=0).text for each in images]
        with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
            llm.chat([show_any(tmp_path / "none.png")])
    assert set(texts) == {text_of(answer(seeing, ask("What is this?", make_file(1))))}


@pytest.mark.parametrize("kind", ["non-causal", "grid"])
def test_other_families_answer_as_the_engine_alone(kind: str, start: StartServer, tmp_path: Path) -> None:
    files = MAKERS[kind](tmp_path)
    server = start(
        str(files.model), "--mmproj", str(files.mmproj), "--parallel", "2", "--ctx-size", "1024", *EXACT
    )
    question = ask("What is this?", make_file(1))
    expected, length = compute_alone(server, files, question, make_file(1))
    for _ in range(2):
        found = answer(server, question)
        assert (text_of(found), found["usage"]["prompt_tokens"]) == (expected, length)
    said = {"role": "assistant", "content": expected}
    again = answer(server, question, said, ask("And this?", make_file(2)))
    server.kill_worker("engine")
    assert text_of(answer(server, question, said, ask("And this?", make_file(2)))) == text_of(again)


@pytest.fixture(scope="module")
def hearing(files: MediaModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hearing")
    made = make_hearing(folder)
    flags = ("--mmproj", str(made.mmproj), "--parallel", "2", "--ctx-size", "1024", *EXACT)
    with Server(folder / "log", str(made.model), *flags) as server:
        yield server


def listen(data: bytes, text: str = "What was said?") -> dict[str, Any]:
    sound = {"type": "input_audio", "input_audio": {"data": make_text(data), "format": "wav"}}
    return {"role": "user", "content": [sound, {"type": "text", "text": text}]}


def test_sound_is_heard_and_encoded_once(hearing: Server) -> None:
    texts = [text_of(answer(hearing, listen(make_sound(seed)))) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert count(hearing, "encoded") == 2 and count(hearing, "cache") == 1
    assert hearing.get("/props")["modalities"] == {"vision": False, "video": False, "audio": True}
    assert "audio" in hearing.get("/v1/models")["data"][0]["capabilities"]


@pytest.mark.parametrize("shape", ["json", "text"])
def test_openai_sdk_transcribes_a_sound(hearing: Server, shape: Any) -> None:
    file = ("speech.wav", make_sound(3))
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="x") as client:
        found = client.audio.transcriptions.create(
            model="hearing", file=file, prompt="Write it down.", response_format=shape
        )
    expected = text_of(answer(hearing, listen(file[1], "Write it down."), max_tokens=None))
    assert (found if shape == "text" else found.text) == expected


def test_what_is_no_sound_is_refused(hearing: Server, seeing: Server) -> None:
    hearing.expect_failure("Unable to read WAV", 1)
    cases = [
        (hearing, listen(make_sound()[:12] + bytes(40)), "must be a whole WAV, MP3 or FLAC file"),
        (hearing, listen(make_file()), "this model does not take pictures"),
        (seeing, listen(make_sound()), "this model does not take sound"),
    ]
    for server, message, reason in cases:
        found = server.post(CHAT, body(message))
        assert found.status_code == 400 and reason in found.json()["error"]["message"], found.text
    upload = {"file": ("x.wav", b"nothing")}
    with make_client(base_url=hearing.url) as client:
        shaped = client.post("/v1/audio/transcriptions", files=upload, data={"response_format": "srt"})
        assert "ask for json or text" in shaped.json()["error"]["message"]
        empty = client.post("/v1/audio/transcriptions", data={"model": "m"})
        assert empty.status_code in (400, 415)


def test_doctor_asks_about_a_picture(files: MediaModel, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(make_file(1))
    found = cllm("doctor", str(files.model), "--image", str(picture), "--threads", "1")
    assert found.returncode == 0, found.stdout
    assert "janus_pro" in found.stdout and "tokens new" in found.stdout
    found = cllm("doctor", str(files.model), "--image", str(tmp_path / "none.png"), "--threads", "1")
    assert found.returncode == 1 and "cannot be read" in found.stdout


def test_the_terminal_shows_a_picture(seeing: Server, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(make_file(1))
    options = f"--url {seeing.url} --max-tokens 12 --temperature 0 --image".split()
    flags = ("run", "What is this?", *options)
    found = cllm(*flags, str(picture))
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == text_of(answer(seeing, ask("What is this?", make_file(1)))).strip()
    missing = cllm(*flags, str(tmp_path / "none.png"))
    assert missing.returncode != 0 and "none.png cannot be read" in missing.stderr
