"""Which variant is loaded, and what of this CPU it leaves unused."""

from __future__ import annotations

from pathlib import Path

from cllm.backend.llama.variant import loaded_variant, unused_features

NEOVERSE = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | REPACK = 1 | "


def test_the_variant_is_the_one_that_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert loaded_variant(maps) is None
    maps.write_text("ffff r-xp 0 fe:00 1   /a/libggml-base.so\nffff r-xp 0 fe:00 1   /a/libggml-cpu.so\n")
    assert loaded_variant(maps) is None
    maps.write_text("ffff r-xp 0 fe:00 1   /a/libggml-cpu-armv8.2_2.so\nffff r-xp 0 fe:00 1   /a/x.so\n")
    assert loaded_variant(maps) == "armv8.2_2"


def test_what_has_kernels_and_was_not_compiled_in_is_unused() -> None:
    assert unused_features({"asimd", "asimddp", "asimdhp", "crc32"}, NEOVERSE) == []
    assert unused_features({"asimddp", "asimdhp", "i8mm", "sve", "bf16"}, NEOVERSE) == ["i8mm", "sve"]
    assert unused_features({"avx", "avx2"}, "CPU : SSE3 = 1 | AVX = 1 | ") == ["avx2"]
