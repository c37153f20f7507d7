"""References to hubs: short forms and pasted URLs."""

from __future__ import annotations

import pytest

from cllm.errors import ConfigError
from cllm.models.reference import HubReference, parse_hub

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
