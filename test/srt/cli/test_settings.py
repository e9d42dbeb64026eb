"""Where an option's value comes from: flag, environment, file, default; and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.cli.options import EngineOptions, flag, option_groups, option_types
from phloem.srt.cli.settings import set_options, to_toml
from phloem.srt.config import CacheOptions, ConstraintOptions, ModelOptions, ServeConfig


def test_option_names_are_unique_across_groups_and_documented() -> None:
    names = [option.name for group in option_groups().values() for option in fields(group)]
    assert len(names) == len(set(names)) == len(option_types())


def test_commands_without_http_take_every_other_group() -> None:
    assert {group.name for group in fields(EngineOptions)} == set(option_groups()) - {"server"}
    assert EngineOptions().config() == ServeConfig()


def test_every_option_is_a_flag_of_serve_with_help(phloem: Any) -> None:
    shown = phloem("serve", "--help").out
    for option in option_types():
        assert any(line.strip("│ ").startswith(f"{flag(option)} ") for line in shown.splitlines())


def test_file_environment_and_flag_in_rising_order(
    phloem: Any, clean_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean_room / "phloem.toml").write_text(
        'port = 1\nmax_running = 2\nthreads = 3\ndisable_radix_cache = true\nlog_level = "debug"\n'
    )
    monkeypatch.setenv("PHLOEM_MAX_RUNNING", "20")
    monkeypatch.setenv("PHLOEM_THREADS", "30")
    result = phloem("doctor", "--threads", "300")
    assert result.code == 0
    section = result.out.partition("Set\n")[2].partition("\n\n")[0]
    settings = dict(line.split() for line in section.splitlines())
    assert settings["port"] == "1"
    assert settings["max_running"] == "20"
    assert settings["threads"] == "300"
    assert settings["disable_radix_cache"] == "True"
    assert "--max-running from the environment" in result.err
    assert "--port, --disable-radix-cache, --log-level from phloem.toml" in result.err


def test_false_in_the_file_is_false(phloem: Any, clean_room: Path) -> None:
    (clean_room / "phloem.toml").write_text("disable_radix_cache = false\n")
    assert "disable_radix_cache" not in phloem("doctor").out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "unknown option in f.toml: prot. Did you mean port?"),
        ("zzz = 1", "unknown option in f.toml: zzz."),
        ("[server]\nport = 1", "[server] is a table"),
        ('port = "1"', "f.toml: port = '1': Expected `int`, got `str`"),
        ("threads = 1.5", "f.toml: threads = 1.5"),
        ('dtype = "int4"', "f.toml: dtype = 'int4'"),
        ("port = ", "f.toml is not TOML"),
    ],
)
def test_faulty_file_is_a_usage_error_that_names_the_fault(
    phloem: Any, clean_room: Path, text: str, said: str
) -> None:
    (clean_room / "f.toml").write_text(text)
    result = phloem("doctor", "--config", "f.toml")
    assert result.code == 2
    assert said in result.err
    assert not result.out


def test_named_file_must_exist(phloem: Any) -> None:
    result = phloem("doctor", "--config", "absent.toml")
    assert result.code == 2
    assert "cannot read absent.toml: No such file" in result.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PHLOEM_PROT", "1", "unknown environment variable PHLOEM_PROT. Did you mean PHLOEM_PORT?"),
        ("PHLOEM_PORT", "one", "Invalid value for PHLOEM_PORT from the environment"),
        ("PHLOEM_DTYPE", "int4", "PHLOEM_DTYPE"),
    ],
)
def test_faulty_variable_is_a_usage_error_that_names_it(
    phloem: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = phloem("doctor")
    assert result.code == 2
    assert said in result.err


def test_other_commands_do_not_read_options(
    phloem: Any, clean_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean_room / "phloem.toml").write_text("nonsense = 1")
    monkeypatch.setenv("PHLOEM_NONSENSE", "1")
    assert phloem("list").code == 0


def test_model_as_argument_and_as_flag_at_once_is_refused(phloem: Any) -> None:
    result = phloem("doctor", "a", "--model", "b")
    assert result.code == 2
    assert "given twice" in result.err


def test_model_as_argument_goes_before_the_file(phloem: Any, clean_room: Path) -> None:
    (clean_room / "phloem.toml").write_text('model = "from-file"')
    assert "model  from-file" in phloem("doctor").out
    assert "model  from-argument" in phloem("doctor", "from-argument").out


def test_option_out_of_range_is_refused_before_anything_starts(phloem: Any) -> None:
    result = phloem("serve", "--port", "65536")
    assert result.code == 1
    assert "server.port is 65536" in result.err


def test_what_is_set_can_be_written_to_a_file_and_read_again(phloem: Any, clean_room: Path) -> None:
    config = ServeConfig(
        model=ModelOptions(model='a "b" é', dtype="bfloat16"),
        cache=CacheOptions(kv_tokens=99, disable_radix_cache=True),
        constraints=ConstraintOptions(compile_timeout_s=0.5),
    )
    written = to_toml(set_options(config))
    (clean_room / "phloem.toml").write_text(written, encoding="utf-8")
    shown = phloem("doctor").out.partition("Set\n")[2].partition("\n\n")[0]
    rows = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert rows == [[name, str(value)] for name, value in set_options(config).items()]
    assert set_options(ServeConfig()) == {}


@pytest.mark.parametrize("source", ["flags", "environment", "file"])
def test_an_option_may_have_several_values(
    phloem: Any, clean_room: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    origins = ["https://a.example", "http://localhost:5173"]
    flags = [word for origin in origins for word in ("--cors-origin", origin)]
    if source == "environment":
        monkeypatch.setenv("PHLOEM_CORS_ORIGIN", ",".join(origins))
    if source == "file":
        (clean_room / "phloem.toml").write_text(f"cors_origin = {origins}\n")
    result = phloem("doctor", *flags * (source == "flags"))
    assert result.code == 0
    assert all(origin in result.out for origin in origins)
