"""`phloem doctor`"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from phloem.srt.cli.options import ConfigFile, ModelName, with_model
from phloem.srt.cli.outcome import ExitCode
from phloem.srt.cli.settings import set_options
from phloem.srt.cli.terminal import columns, megabytes
from phloem.srt.config import ServeConfig
from phloem.srt.errors import PhloemError
from phloem.srt.hub import list_models
from phloem.srt.hub.store import Store
from phloem.srt.resolve import Hardware, Resolved, detect_hardware, resolve

PACKAGES = (
    "phloem",
    "torch",
    "xgrammar",
    "tokenizers",
    "gguf",
    "safetensors",
    "huggingface_hub",
    "aiohttp",
    "pyzmq",
    "msgspec",
)


def doctor(
    model: ModelName = None,
    /,
    *,
    options: ServeConfig | None = None,
    config: ConfigFile = None,
) -> int:
    """Tell what this machine has, what would be chosen for it, and why.

    Takes the options of `serve`, so that it shows what they lead to. Starts nothing and touches
    no network. Exit code 1 if something is missing or damaged.
    """
    asked = with_model(options or ServeConfig(), model)
    hardware = detect_hardware()
    resolved = resolve(asked, hardware)
    packages, missing = _versions()
    troubles = [f"{name} is not installed" for name in missing]
    for title, rows in (
        ("Machine", _machine(hardware)),
        ("Versions", packages),
        ("Chosen", _chosen(resolved)),
        ("Set", [(name, str(value)) for name, value in set_options(asked).items()]),
        ("Models", _models(troubles)),
    ):
        if rows:
            print(title)
            print("\n".join("  " + line for line in columns(rows).splitlines()))
            print()
    print("\n".join(troubles) or "All is well.")
    return ExitCode.FAILED if troubles else ExitCode.OK


def _machine(hardware: Hardware) -> list[tuple[str, str]]:
    quota = "" if hardware.quota is None else f", quota {hardware.quota:g}"
    memory = f"{megabytes(hardware.memory_free)} free of {megabytes(hardware.memory_total)}"
    return [
        ("system", platform.platform()),
        ("cpu", hardware.cpu),
        ("isa", hardware.isa),
        ("cpus", f"{hardware.affinity} usable of {hardware.logical_cpus}{quota}"),
        ("memory", memory),
    ]


def _versions() -> tuple[list[tuple[str, str]], list[str]]:
    rows, missing = [("python", platform.python_version())], []
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            missing.append(package)
    return rows, missing


def _chosen(resolved: Resolved) -> list[tuple[str, str]]:
    return [(name, f"{getattr(resolved, name)}: {why}") for name, why in resolved.reasons.items()]


def _models(troubles: list[str]) -> list[tuple[str, str]]:
    store = Store.default()
    rows = [("store", str(store.root))]
    try:
        stored = list_models(store=store)
    except PhloemError as error:
        troubles.append(error.message)
        return rows
    for model in stored:
        rows.append((model.name, megabytes(model.size)))
        manifest = store.manifest(model.name)
        try:
            if manifest is not None:
                store.path(manifest)
        except PhloemError as error:
            troubles.append(error.message)
    return rows
