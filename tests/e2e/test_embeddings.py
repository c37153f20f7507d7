"""`/v1/embeddings` and `/v1/rerank` over HTTP: OpenAI's SDK, an encoder, a reranker, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest

from cllm import LLM, AsyncLLM
from cllm.errors import ContextLengthExceeded, InvalidRequest
from tests.driver.server import PATIENCE_S, Server, StartServer, wait_for
from tests.tiny_encoders import make_encoder, make_reranker

CAT, KITTEN, RATES = (
    "The cat sat on the mat.",
    "A kitten rested on the rug.",
    "The central bank raised interest rates by half a percentage point.",
)
Vector = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    """A client of the tiny model: its weights are F32, so a text alone and among others is the same."""
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A bert, with its probe."""
    folder = tmp_path_factory.mktemp("encoder")
    with Server(folder / "log", str(make_encoder(folder / "tiny-bert.gguf")), "--threads", "1") as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reranker")
    with Server(folder / "log", str(make_reranker(folder / "tiny-rank.gguf")), "--threads", "1") as server:
        yield server


def vectors(client: openai.OpenAI, value: Any, **options: Any) -> list[Vector]:
    answer = client.embeddings.create(model="any", input=value, **options)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [np.array(one.embedding) for one in answer.data]


def post(server: Server, **body: Any) -> list[Vector]:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return [np.array(one["embedding"]) for one in answer.json()["data"]]


def assert_same(found: Sequence[Vector], wanted: Sequence[Vector], likeness: float = 0.9999) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one @ other > likeness


# OpenAI's SDK on an ordinary model ------------------------------------------------------------------


def test_similar_texts_are_closer_than_dissimilar_ones(embedded: Server) -> None:
    cat, kitten, rates = post(embedded, input=[CAT, KITTEN, RATES])
    assert cat @ kitten > cat @ rates and kitten @ cat > kitten @ rates
    length = embedded.get("/model/info")["embedding_length"]
    for vector in (cat, kitten, rates):
        assert vector.shape == (length,) and abs(np.linalg.norm(vector) - 1) < 1e-5


def test_numbers_and_base64_are_the_same_floats(client: openai.OpenAI, tiny: Server) -> None:
    """The SDK asks for base64 by default."""
    (by_default,) = vectors(client, CAT)
    (numbers,) = vectors(client, CAT, encoding_format="float")
    np.testing.assert_allclose(by_default, numbers, atol=1e-6)
    body = {"input": CAT, "encoding_format": "base64"}
    raw = tiny.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), numbers, atol=1e-6)


def test_dimensions_cut_and_scale(client: openai.OpenAI) -> None:
    (whole,), (cut,) = vectors(client, CAT), vectors(client, CAT, dimensions=16)
    assert cut.shape == (16,) and abs(np.linalg.norm(cut) - 1) < 1e-5
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-5)
    assert vectors(client, CAT, dimensions=64)[0].shape == (64,)


def test_twenty_inputs_come_back_in_their_order(client: openai.OpenAI, tiny: Server) -> None:
    words = "cat sea bank music war tea moon shoe law fish king snow code bread glass hat train tree ox six"
    texts = [f"{word} " * (2 + number * 7 % 9) for number, word in enumerate(words.split())]
    answer = client.embeddings.create(model="any", input=texts)
    assert [one.index for one in answer.data] == list(range(20))
    together = [np.array(one.embedding) for one in answer.data]
    for number in (0, 7, 13, 19):
        alone = vectors(client, texts[number])[0]
        likeness = [float(alone @ one) for one in together]
        assert likeness[number] > 0.9999 and int(np.argmax(likeness)) == number
        assert sorted(likeness)[-2] < 0.99, "texts that cannot be told apart show no order"
    lengths = [tiny.post("/encode", {"text": text}).json()["length"] for text in texts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)


def test_texts_and_their_tokens_are_the_same(client: openai.OpenAI, tiny: Server) -> None:
    tokens = [tiny.post("/encode", {"text": text}).json()["tokens"] for text in (CAT, RATES)]
    assert_same(vectors(client, tokens), vectors(client, [CAT, RATES]))
    assert_same(vectors(client, tokens[1]), vectors(client, RATES))


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        vectors(client, [CAT, "0" * 5000])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    assert "input 1 has 5000 tokens" in str(refused.value) and "4096" in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="65"):
        vectors(client, CAT, dimensions=65)
    with pytest.raises(openai.BadRequestError, match="5000 tokens"):
        vectors(client, [[1] * 5000])
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="../../etc/passwd", input=CAT)


def test_llama_servers_own_shape(tiny: Server, client: openai.OpenAI) -> None:
    wanted = vectors(client, [CAT, RATES])
    for path in ("/embedding", "/embeddings"):
        answer = tiny.post(path, {"content": [CAT, RATES]})
        assert answer.status_code == 200, answer.text
        entries = answer.json()
        assert [entry["index"] for entry in entries] == [0, 1]
        assert_same([np.array(entry["embedding"][0]) for entry in entries], wanted)
    raw = tiny.post("/embedding", {"content": CAT, "embd_normalize": -1}).json()[0]["embedding"][0]
    assert np.linalg.norm(raw) > 2
    refused = tiny.post("/embedding", {"content": ""})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == 400


# Beside streams, and after disconnects --------------------------------------------------------------


def test_streams_go_on_while_many_texts_are_embedded(tiny: Server) -> None:
    alone = tiny.generate("a stream beside vectors", 200)["text"]
    inputs = [f"text number {number} " * 20 for number in range(60)]
    found: list[list[Vector]] = []
    work = threading.Thread(target=lambda: found.append(post(tiny, input=inputs)))
    with tiny.open_stream("a stream beside vectors", 200) as events:
        first = next(events)["token"]
        work.start()
        text = first + "".join(event["token"] for event in events)
    work.join(PATIENCE_S)
    assert text == alone
    some = (0, 30, 59)
    assert_same([found[0][number] for number in some], post(tiny, input=[inputs[number] for number in some]))
    wait_for(tiny.idle)


def test_embeddings_of_a_disconnected_client_are_not_computed(tiny: Server) -> None:
    before = tiny.finished("cancelled")
    body = {"input": ["0123456789" * 100] * 1000}
    connection = tiny.connect(body, "/v1/embeddings")
    wait_for(lambda: tiny.get("/debug/requests")["requests"])
    (entry,) = tiny.get("/debug/requests")["requests"]
    assert entry["prompt_tokens"] == 1_000_000
    connection.close()
    wait_for(tiny.idle)
    assert tiny.finished("cancelled") == before + 1
    assert "Traceback" not in tiny.log_text


def test_a_text_over_many_steps_is_one_vector_and_a_call_outlives_the_engine(
    start: StartServer, tiny: Server, tiny_model: Path
) -> None:
    server = start(str(tiny_model), "--threads", "1", "--batch-tokens", "64")
    inputs = ["0123456789" * 30 + str(number) for number in range(50)]  # five steps each; one on `tiny`
    found: list[list[Vector]] = []
    work = threading.Thread(target=lambda: found.append(post(server, input=inputs)))
    work.start()
    wait_for(lambda: server.metrics()["cllm_decoded_tokens_total"] > 0)
    server.kill_worker("engine")
    work.join(90)
    assert len(found[0]) == 50
    assert_same(found[0], post(tiny, input=inputs))
    wait_for(server.idle)


# Encoders and rerankers -----------------------------------------------------------------------------


def test_an_encoder_embeds(encoder: Server) -> None:
    info = encoder.get("/model/info")
    assert (info["generates"], info["pooling"], info["vector_length"]) == (False, "mean", 64)
    one, two = post(encoder, input=["hello world", "9 lives"])
    assert one.shape == (64,) and abs(np.linalg.norm(one) - 1) < 1e-5 and one @ two < 0.99
    assert_same(post(encoder, input="hello world"), [one])
    assert_same(post(encoder, input=["x" * n for n in range(1, 101)])[-1:], post(encoder, input="x" * 100))
    refused = encoder.post("/v1/embeddings", {"input": ["x", "y" * 600]}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert "input 1 has 602 tokens" in refused["message"] and "512" in refused["message"]
    assert encoder.idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "x"}),
        ("/generate_stream", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_an_encoder_says_that_it_cannot_generate(path: str, body: dict[str, Any], encoder: Server) -> None:
    answer = encoder.post(path, body)
    assert answer.status_code == 400
    assert "generates no text" in answer.text and "/v1/embeddings" in answer.text
    assert (
        encoder.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code
        == 400
    )
    assert encoder.get("/health")["engine"] == "ready"


def test_pooling_can_be_chosen(start: StartServer, tmp_path: Path, encoder: Server) -> None:
    server = start(str(make_encoder(tmp_path / "bert.gguf")), "--threads", "1", "--pooling", "cls")
    assert server.get("/model/info")["pooling"] == "cls"
    (mean,), (cls,) = post(encoder, input="hello world"), post(server, input="hello world")
    assert mean @ cls < 0.99


def test_documents_are_ranked(reranker: Server) -> None:
    documents = ["hello you", "x", "9 lives", "a panda is a bear"]
    body = {"query": "what is a panda", "documents": documents}
    answer = reranker.post("/v1/rerank", body).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert sorted(scores) == [0, 1, 2, 3] and len(set(scores.values())) == 4
    ranked = [entry["relevance_score"] for entry in answer["results"]]
    assert ranked == sorted(ranked, reverse=True)
    for index, document in enumerate(documents):
        alone = reranker.post("/v1/rerank", {**body, "documents": [document]}).json()
        assert abs(alone["results"][0]["relevance_score"] - scores[index]) < 1e-4
    # [CLS], the query without its spaces, [SEP], a document, [SEP]
    tokens = sum(3 + len("whatisapanda") + len(one.replace(" ", "")) for one in documents)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    best = reranker.post(
        "/v1/rerank",
        {**body, "documents": [{"text": one} for one in documents], "top_n": 2, "return_documents": True},
    ).json()["results"]
    assert [entry["index"] for entry in best] == [entry["index"] for entry in answer["results"][:2]]
    assert all(entry["document"] == {"text": documents[entry["index"]]} for entry in best)
    assert reranker.idle()


def scores(server: Server, text_1: Any, text_2: Any) -> list[float]:
    answer = server.post("/v1/score", {"text_1": text_1, "text_2": text_2, "model": "any"}).json()
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "any", "score-")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (index, "score") for index in range(len(answer["data"]))
    ]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > len(answer["data"])
    return [one["score"] for one in answer["data"]]


def test_pairs_are_scored_as_they_are_ranked(reranker: Server) -> None:
    queries, documents = ["What is a panda?", "hello"], ["It is a bear.", "hi there"]
    ranked = {}
    for query in queries:
        results = reranker.post("/v1/rerank", {"query": query, "documents": documents}).json()["results"]
        ranked[query] = [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]
    assert scores(reranker, queries[0], documents[1]) == pytest.approx([ranked[queries[0]][1]], abs=1e-3)
    assert scores(reranker, queries[0], documents) == pytest.approx(ranked[queries[0]], abs=1e-3)
    assert scores(reranker, [queries[1]], documents) == pytest.approx(ranked[queries[1]], abs=1e-3)
    own = [ranked[query][index] for index, query in enumerate(queries)]
    assert scores(reranker, queries, documents) == pytest.approx(own, abs=1e-3)
    assert len(set(ranked[queries[0]] + ranked[queries[1]])) == 4, "scores that cannot be told apart"


def test_bad_pairs_are_a_400(reranker: Server, tiny: Server) -> None:
    long = "a long text " * 1000
    for text_1 in ("a", ["a", "b"]):
        error = reranker.post("/v1/score", {"text_1": text_1, "text_2": ["x", long]}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "text_2")
        assert error["message"].startswith("text_2 1 has")
    refused = tiny.post("/v1/score", {"text_1": "x", "text_2": "y"})
    ranking = tiny.post("/v1/rerank", {"query": "x", "documents": ["y"]})
    assert refused.status_code == 400 and refused.json() == ranking.json()


def test_a_reranker_makes_no_vectors(reranker: Server) -> None:
    answer = reranker.post("/v1/embeddings", {"input": "x"})
    assert answer.status_code == 400 and "reranker" in answer.json()["error"]["message"]


# The page and the Python API ------------------------------------------------------------------------


def test_the_python_api_embeds(client: openai.OpenAI, tiny_model: Path) -> None:
    wanted = vectors(client, [CAT, RATES])

    async def use() -> list[list[float]]:
        async with AsyncLLM(tiny_model, parallel=2, ctx_size=1024, threads=1) as model:
            return await model.embed([CAT, RATES])

    with LLM(tiny_model, parallel=2, ctx_size=1024, threads=1) as llm:
        assert_same([np.array(one) for one in llm.embed([CAT, RATES])], wanted)
        assert_same([np.array(one) for one in llm.embed(CAT)], wanted[:1])
        assert llm.embed([]) == []
        with pytest.raises(ContextLengthExceeded, match="input 0 has"):
            llm.embed("0" * 5000)
        with pytest.raises(InvalidRequest, match="empty"):
            llm.embed([CAT, ""])
    assert_same([np.array(one) for one in asyncio.run(use())], wanted)
