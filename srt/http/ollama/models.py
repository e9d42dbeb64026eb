"""The models that are here: the served one, and those of the store, as Ollama lists and shows them.

Only headers of files are read, and what was read is kept for as long as the file stays the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import UNSET

from phloem.srt.checkpoint import (
    CheckpointError,
    ModelConfig,
    expected_tensors,
    open_checkpoint,
)
from phloem.srt.errors import Conflict, NotFound
from phloem.srt.generation import ModelCard
from phloem.srt.http.ollama.calls import plain_name
from phloem.srt.http.ollama.options import REPEAT_PENALTY, TEMPERATURE, TOP_K, TOP_P
from phloem.srt.http.ollama.replies import (
    Details,
    Listed,
    Processes,
    Running,
    Show,
    Tags,
    timestamp,
)
from phloem.srt.hub import LocalModel, list_models, remove

_KEPT: Final = 64
_UNITS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a model's files say of it: `format` as in "gguf Q4_1", `changed` in seconds since 1970.
    `config` is None for files that cannot be read."""

    format: str
    config: ModelConfig | None
    size: int
    changed: float
    template: str

    @property
    def parameters(self) -> int:
        if self.config is None:
            return 0
        return sum(math.prod(shape) for shape in expected_tensors(self.config).values())

    def details(self) -> Details:
        kind, _, quantization = self.format.partition(" ")
        family = "" if self.config is None else self.config.architecture
        return Details(
            format=kind,
            family=family,
            families=[family] if family else [],
            parameter_size=_short(self.parameters),
            quantization_level=quantization,
        )


def tags(card: ModelCard) -> Tags:
    """Every model that is here, the served one first. Reads files: not for the event loop."""
    served = _served(card)
    others = [
        _listed(model.name, model)
        for model in list_models()
        if plain_name(model.name) != plain_name(card.name)
    ]
    return Tags([_listed(card.name, served), *others])


def processes(card: ModelCard) -> Processes:
    """The served model. Reads files, as `tags` does."""
    listed = _listed(card.name, _served(card))
    return Processes(
        [
            Running(
                name=listed.name,
                model=listed.model,
                size=listed.size,
                digest=listed.digest,
                details=listed.details,
                context_length=card.context_length,
            )
        ]
    )


def show(name: str, card: ModelCard, *, inserts: bool) -> Show:
    """A model's particulars; `inserts` says whether the served one can fill in a gap. Reads files,
    as `tags` does. Raises `NotFound` when it is not here."""
    served = plain_name(name) == plain_name(card.name)
    model = _served(card) if served else _stored(name)
    facts = _facts(model.path)
    more = {"insert": inserts, "thinking": card.reasoning is not None} if served else {}
    parameters = {
        "repeat_penalty": REPEAT_PENALTY,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": TOP_P,
    }
    template = card.chat_template if served else facts.template
    lines = [f"{key:<30} {value}" for key, value in parameters.items()]
    modelfile = [f"FROM {name}", f'TEMPLATE """{template}"""']
    modelfile += [f"PARAMETER {key} {value}" for key, value in parameters.items()]
    return Show(
        license=model.license,
        modelfile="\n".join(modelfile),
        parameters="\n".join(lines),
        template=template,
        details=facts.details(),
        model_info=_model_info(facts, card.context_length if served else None),
        capabilities=["completion", "tools", *(name for name, can in more.items() if can)],
        modified_at=timestamp(facts.changed),
    )


def delete(name: str, card: ModelCard) -> None:
    """Remove a model from the store. Raises `NotFound` when the store does not have it, and
    `Conflict` for the model that is served."""
    served = plain_name(name) == plain_name(card.name)
    if served or _stored(name).path == Path(card.path):
        raise Conflict(
            f"model {name!r} is being served; stop the server before it is deleted",
            param="model",
            code="model_in_use",
        )
    remove(_stored(name).name)


def _stored(name: str) -> LocalModel:
    wanted = plain_name(name)
    found = next((model for model in list_models() if plain_name(model.name) == wanted), None)
    if found is None:
        raise NotFound(f"model {name!r} not found", param="model", code="model_not_found")
    return found


def _served(card: ModelCard) -> LocalModel:
    """The served model as the store has it, or as its path is all that is known."""
    path = Path(card.path)
    stored = next((model for model in list_models() if model.path == path), None)
    return stored or LocalModel(
        name=card.name, path=path, license="unknown", source="local", size=0, sha256=None
    )


def _listed(name: str, model: LocalModel) -> Listed:
    facts = _facts(model.path)
    tagged = name if ":" in name else f"{name}:latest"
    return Listed(
        name=tagged,
        model=tagged,
        modified_at=timestamp(facts.changed),
        size=facts.size,
        digest=model.sha256 or UNSET,
        details=facts.details(),
    )


def _facts(path: Path) -> _Facts:
    try:
        files = [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]
        found = [file.stat() for file in files]
    except OSError:
        return _Facts(format="", config=None, size=0, changed=0.0, template="")
    size, changed = (
        sum(one.st_size for one in found),
        max((one.st_mtime for one in found), default=0.0),
    )
    return _read_facts(path, size, changed)


@functools.lru_cache(_KEPT)
def _read_facts(path: Path, size: int, changed: float) -> _Facts:
    try:
        checkpoint = open_checkpoint(path)
        template = checkpoint.tokenizer_data().chat_templates.get("default", "")
    except CheckpointError:  # it may be listed, and deleted, all the same
        kind = "gguf" if path.suffix == ".gguf" else ""
        return _Facts(format=kind, config=None, size=size, changed=changed, template="")
    return _Facts(
        format=checkpoint.format,
        config=checkpoint.config,
        size=size,
        changed=changed,
        template=template,
    )


def _model_info(facts: _Facts, context_length: int | None) -> dict[str, object]:
    """Facts under the keys that GGUF has for them. `context_length` is what the server was started
    with, where the model is served."""
    config = facts.config
    if config is None:
        return {}
    numbers = {
        "context_length": context_length or config.context_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
    }
    return {
        "general.architecture": config.architecture,
        "general.parameter_count": facts.parameters,
        **{f"{config.architecture}.{key}": value for key, value in numbers.items()},
    }


def _short(count: int) -> str:
    """A number of parameters as model names have it: 134.5M."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count) if count else ""
