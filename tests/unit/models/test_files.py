"""Which files make a model, which quantisation it has, and which is chosen."""

from __future__ import annotations

import pytest

from cllm.errors import ConfigError, ModelFileError
from cllm.models import files
from cllm.models.files import HubReference, choose_files, group_files, parse_hub

SIZES = {
    "README.md": 1,
    "m-Q4_K_M.gguf": 40,
    "m-Q4_K_S.gguf": 38,
    "m-Q8_0.gguf": 80,
    "m-UD-Q4_K_XL.gguf": 44,
    "mmproj-F16.gguf": 5,
    "m.imatrix.gguf": 5,
    "BF16/m-BF16-00001-of-00003.gguf": 50,
    "BF16/m-BF16-00003-of-00003.gguf": 50,
    "BF16/m-BF16-00002-of-00003.gguf": 60,
}


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m.IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-fp16.gguf", "F16"),
        ("m-BF16-00001-of-00002.gguf", "BF16"),
        ("Q6_K/m-00001-of-00002.gguf", "Q6_K"),
        ("TriLM-TQ2_0.gguf", "TQ2_0"),
        ("Q4_0_instruct-Q5_1.gguf", "Q5_1"),
        ("model.gguf", ""),
        ("QQ4-model.gguf", ""),
    ],
)
def test_the_quantisation_is_read_from_the_name(name: str, quant: str) -> None:
    assert files.parse_quant(name) == quant


def test_parts_are_one_model_and_companions_none() -> None:
    models = {model.quant: model for model in group_files(SIZES)}
    assert set(models) == {"Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q4_K_XL", "BF16"}
    split = models["BF16"]
    assert split.whole and split.size == 160 and split.stem == "m-BF16"
    assert list(split.names) == sorted(split.names) and len(split.names) == 3


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", "Q4_K_M"),
        ("q8_0", "Q8_0"),
        ("Q4_K_XL", "UD-Q4_K_XL"),
        ("Q4", "Q4_K_M"),
        ("m-Q4_K_S.gguf", "Q4_K_S"),
        ("BF16/m-BF16-00002-of-00003.gguf", "BF16"),
        ("m-bf16-00001-of-00003.gguf", "BF16"),
    ],
)
def test_a_model_is_chosen(wanted: str, chosen: str) -> None:
    assert choose_files(group_files(SIZES), wanted, "here").quant == chosen


def test_without_the_usual_ones_the_next_is_taken() -> None:
    assert choose_files(group_files({"m-F16.gguf": 4, "m-Q8_0.gguf": 2}), "", "x").quant == "Q8_0"
    assert choose_files(group_files({"odd.gguf": 4}), "", "x").stem == "odd"


def test_what_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(ModelFileError, match=r"hf:a/b has no Q2_K; it has Q4_K_S \(38 B\), Q4_K_M \(40 B\)"):
        choose_files(group_files(SIZES), "Q2_K", "hf:a/b")
    with pytest.raises(ModelFileError, match="no GGUF file"):
        choose_files([], "", "hf:a/b")


def test_several_models_of_one_quantisation_are_listed() -> None:
    two = group_files({"a-Q4_K_M.gguf": 1, "b-Q4_K_M.gguf": 2})
    with pytest.raises(ModelFileError, match=r"a-Q4_K_M.gguf, b-Q4_K_M.gguf; name one"):
        choose_files(two, "", "hf:a/b")
    assert choose_files(two, "b-Q4_K_M.gguf", "x").stem == "b-Q4_K_M"


def test_sizes_are_readable() -> None:
    sizes = [0, 999, 1500, 123_456_789, 4_200_000_000, 1_500_000_000_000]
    assert ", ".join(map(files.format_size, sizes)) == "0 B, 999 B, 2 KB, 123 MB, 4.2 GB, 1.50 TB"
    assert files.describe_files(group_files({"m-Q8_0.gguf": 1_234_000})) == "Q8_0 (1.2 MB)"


@pytest.mark.parametrize(
    ("description", "name", "quant"),
    [
        ("llama 8B Q4_K - Medium", "Q4_K - Medium", "Q4_K_M"),
        ("gemma3 270M Q3_K - Large", "Q3_K - Large", "Q3_K_L"),
        ("llama 8B Q2_K - Medium", "Q2_K - Medium", "Q2_K"),
        ("llama 8B Q2_K - Small", "Q2_K - Small", "Q2_K_S"),
        ("llama4 17Bx16E (Scout) Q5_K - Small", "Q5_K - Small", "Q5_K_S"),
        ("llama 256M (guessed) Q4_1", "Q4_1", "Q4_1"),
        ("qwen3moe 30B.A3B IQ2_XXS - 2.0625 bpw", "IQ2_XXS - 2.0625 bpw", "IQ2_XXS"),
        ("bert 33M all F32", "F32", "F32"),
        ("llama ?B unknown, may not work", "", ""),
    ],
)
def test_the_file_type_of_a_loaded_model(description: str, name: str, quant: str) -> None:
    assert files.parse_file_type(description) == (name, quant)


HF = "https://huggingface.co"
MS = "https://www.modelscope.cn"
FILE = "m-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hf:U/R", HubReference("hf", "U/R")),
        ("HF:U/R:q4_k_m", HubReference("hf", "U/R", "q4_k_m")),
        ("hf:U/R:Q4_K_M@v1.2", HubReference("hf", "U/R", "Q4_K_M", "v1.2")),
        ("hf:U/R@v1", HubReference("hf", "U/R", "", "v1")),
        (f"hf:U/R/sub/{FILE}", HubReference("hf", "U/R", f"sub/{FILE}")),
        (f"hf:U/R:{FILE}", HubReference("hf", "U/R", FILE)),
        ("hf://U/R", HubReference("hf", "U/R")),
        ("ms:Qwen/Qwen3-0.6B-GGUF:Q8_0", HubReference("ms", "Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("hf.co/U/R:Q8_0", HubReference("hf", "U/R", "Q8_0")),
        (f"{HF}/U/R", HubReference("hf", "U/R")),
        (f"{HF}/U/R/", HubReference("hf", "U/R")),
        (f"{HF}/U/R/tree/main", HubReference("hf", "U/R")),
        (f"{HF}/U/R/tree/v1", HubReference("hf", "U/R", "", "v1")),
        (f"{HF}/U/R/tree/refs%2Fpr%2F1", HubReference("hf", "U/R", "", "refs/pr/1")),
        ("hf:U/R@refs/pr/1", HubReference("hf", "U/R", "", "refs/pr/1")),
        (f"{HF}/U/R/blob/main/{FILE}", HubReference("hf", "U/R", FILE)),
        (f"{HF}/U/R/blob/main/sub/{FILE}", HubReference("hf", "U/R", f"sub/{FILE}")),
        (f"{HF}/U/R/resolve/v1/{FILE}?download=true", HubReference("hf", "U/R", FILE, "v1")),
        (f"{HF}/U/R/resolve/main/a%20b.gguf", HubReference("hf", "U/R", "a b.gguf")),
        (f"{HF}/U/R?show_file_info={FILE}", HubReference("hf", "U/R")),
        (f"{MS}/models/U/R", HubReference("ms", "U/R")),
        (f"{MS}/models/U/R/summary", HubReference("ms", "U/R")),
        (f"{MS}/models/U/R/resolve/master/{FILE}", HubReference("ms", "U/R", FILE)),
        (f"{MS}/models/U/R/file/view/master/{FILE}?status=2", HubReference("ms", "U/R", FILE)),
        (f"https://a.mirror/U/R/blob/main/{FILE}", HubReference("hf", "U/R", FILE, "", "https://a.mirror")),
        ("./model.gguf", None),
        ("smollm2", None),
        ("U/R", None),
        ("hfx:U/R", None),
    ],
)
def test_what_a_text_means(text: str, found: HubReference | None) -> None:
    assert parse_hub(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("hf:", "hf:R", "hf:U/R:Q4:Q8", "hf:../x", "ms:U/..", "hf:U/R/x.bin"),
        *("hf:u--v/R", "hf:U/R.git", "hf:U/-R", "ms:U/R\x1b[2J", "hf:U/R:Q4\x1b[2J", "hf:U/R:../Q4"),
        *("hf:U/R@../../x", "hf:U/R@/dev/zero", "hf:U/R@a..b", "hf:U/R@.hidden", "hf:U/R@a/.b"),
        "hf:U/R@x.lock",
        *("hf:U/R@-x", "hf:U/R@a b", "hf:U/R@a~1", "hf:U/R@HEAD^", "hf:U/R@a\\b", "hf:U/R@a//b", "hf:U/R@a."),
        "https://a.mirror/U/R/resolve/%2Fhome%2Fme%2F.bashrc/m-Q4_0.gguf",
        f"{HF}/U/R/tree/..%2F..%2Fx",
        f"{HF}/U/R/resolve/main/..%2F..%2Fm.gguf",
        *(f"{HF}/datasets/U/R", HF, "https://example.org/U/R", f"{HF}/../..", "http://[", f"{HF}/U"),
    ],
)
def test_a_malformed_one_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_hub(text)


def test_a_reference_is_written_as_it_is_read() -> None:
    for text in ("hf:U/R", "ms:U/R:Q8_0", "hf:U/R:Q4_K_M@v1", "hf:U/R@v1"):
        assert str(parse_hub(text)) == text


def test_the_host_of_a_mirror_is_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    assert parse_hub(f"https://hub.example/U/R/blob/main/{FILE}") == HubReference("hf", "U/R", FILE)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1,023 B"), (1815 << 20, "1.77 GiB"), (99 << 20, "99 MiB"), (512 << 20, "512 MiB")],
)
def test_memory_is_shown_in_powers_of_1024(size: int, shown: str) -> None:
    assert files.format_memory(size) == shown
