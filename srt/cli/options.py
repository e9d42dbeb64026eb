"""The options of the commands, as the parser sees the configuration classes.

A flag is a field: `ServeConfig.cache.kv_tokens` is `--kv-tokens`. Groups only order the help.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, get_type_hints

from cyclopts import Group, Parameter

from phloem.srt.config import (
    CacheOptions,
    ConstraintOptions,
    LogOptions,
    ModelOptions,
    SchedulerOptions,
    ServeConfig,
    WorkerOptions,
)


def option_groups() -> dict[str, type]:
    """Name of each group in `ServeConfig` → its class."""
    hints = get_type_hints(ServeConfig)
    return {group.name: hints[group.name] for group in fields(ServeConfig)}


def option_types() -> dict[str, object]:
    """Name of each option → its type. Options are unique across groups."""
    return {
        name: hint
        for group in option_groups().values()
        for name, hint in get_type_hints(group).items()
    }


def flag(option: str) -> str:
    """`kv_tokens` → `--kv-tokens`."""
    return f"--{option.replace('_', '-')}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """`ServeConfig` without the HTTP face, for commands that serve nobody."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    constraints: ConstraintOptions = field(default_factory=ConstraintOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def config(self) -> ServeConfig:
        return ServeConfig(**{group.name: getattr(self, group.name) for group in fields(self)})


# The parser reads these marks: no prefix before a flag, a panel of its own for each group.
Parameter(name="*")(ServeConfig)
for _position, (_name, _group) in enumerate(option_groups().items(), 1):
    Parameter(name="*", group=Group(_name.capitalize(), sort_key=_position))(_group)

ModelName = Annotated[str | None, Parameter(help="The same as --model.")]

ConfigFile = Annotated[
    Path | None,
    Parameter(
        help="TOML file of options, named as in the flags (kv_tokens = 8192). By default "
        "phloem.toml, if there is one. Flags go before PHLOEM_* variables, those before the file."
    ),
]


def with_model(config: ServeConfig, name: str | None) -> ServeConfig:
    """`config` with the model given as an argument, if one was."""
    return config if name is None else replace(config, model=replace(config.model, model=name))
