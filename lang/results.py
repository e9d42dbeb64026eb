"""A batch whose results outlive it: each program that ends adds a line to a file, and a batch that
was killed goes on behind the lines that are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from phloem.lang.batch import Start
from phloem.lang.errors import Cancelled, GenerationError, RecordedFailure
from phloem.lang.line_file import LineFile
from phloem.lang.run import Run
from phloem.lang.state import State
from phloem.lang.variable import Variable

ItemT = TypeVar("ItemT")

_OPENING: Final = b'{"key":'


@dataclass(frozen=True)
class BatchOutput:
    """Where a batch's results go: a file of JSON lines.

    A line has the program's `arguments` and `variables`, what it `returned`, its `error`, and its
    token counts. `key` says which item a line is of: the name of an argument, or a function of the
    item; by default it is the item's position, so that the items must come in the same order again.
    Programs that failed are not run again, unless `retry_failed`.
    """

    path: str | os.PathLike[str]
    key: str | Callable[[Any], object] | None = None
    retry_failed: bool = False


OutputLike = BatchOutput | str | os.PathLike[str]
"""A file for the results of a batch; a path is `BatchOutput(path)`."""


class _Failure(msgspec.Struct, frozen=True):
    type: str
    message: str
    variable: str | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a program that has ended. `left_out` names what JSON cannot express; a failed
    program's `error` has the variable whose call failed, if it was one."""

    key: str
    arguments: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    returned: Any = None
    error: _Failure | None = None
    usage: dict[str, int] = {}
    left_out: list[str] = []


class _Key(msgspec.Struct):
    key: str


class _Outcome(msgspec.Struct):
    error: object = None


_line = msgspec.json.Decoder(_Line)
_key = msgspec.json.Decoder(_Key)
_outcome = msgspec.json.Decoder(_Outcome)


def recorded(
    output: OutputLike,
    items: Iterable[ItemT],
    start: Start[ItemT],
    run: Callable[[Iterable[tuple[int, ItemT]], Start[tuple[int, ItemT]]], Iterator[State]],
) -> Iterator[State]:
    """The states of `run`, which is a batch of `items` and `start`, each written down before it is
    given; those that the file has already are made of it, and not run.

    Raises `LineFileError` for a file that is in use or has something else in it, `ValueError` for
    two items with one key, or one whose line is of other arguments, and `OSError`.
    """
    results = _Results(output if isinstance(output, BatchOutput) else BatchOutput(output))
    numbered = _Numbered(items) if isinstance(items, Sized) else enumerate(items)
    try:
        states = run(numbered, results.around(start))
        # `yield from` would cancel what still runs before the file is closed: its programs would
        # be written down as ended.
        for state in states:  # noqa: UP028
            yield state
    finally:
        results.close()


class _Numbered(Generic[ItemT]):
    """`enumerate` with a length."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(cast("Sized", self._items))

    def __iter__(self) -> Iterator[tuple[int, ItemT]]:
        return enumerate(self._items)


class _Results:
    """The file of a running batch."""

    def __init__(self, output: BatchOutput) -> None:
        self._key = output.key
        path = Path(output.path)
        keep = _succeeded if output.retry_failed else None
        self._file = LineFile(path, opening=_OPENING, key_of=_key_of, keep=keep)

    def around(self, start: Start[ItemT]) -> Start[tuple[int, ItemT]]:
        """`start`, with what it starts written down at its end."""

        def begin(numbered: tuple[int, ItemT]) -> tuple[State, Run, Callable[[], None]]:
            index, item = numbered
            key = self._key_of_item(index, item)
            line = self._file.claim(key)
            state, run, work = start(item)

            def work_and_write() -> None:
                work()
                self._write(key, state)

            if line is None:
                return state, run, work_and_write
            return state, run, lambda: _restore(state, _line.decode(line), item)

        return begin

    def close(self) -> None:
        """Take no more lines; those that are being written are waited for."""
        self._file.close()

    def _write(self, key: str, state: State) -> None:
        failure = state.error()
        if isinstance(failure, GenerationError) and isinstance(failure.cause, Cancelled):
            return  # it was stopped with the batch
        self._file.append(msgspec.json.encode(_line_of(key, state, failure)))

    def _key_of_item(self, index: int, item: object) -> str:
        if self._key is None:
            return str(index)
        if callable(self._key):
            return str(self._key(item))
        if isinstance(item, Mapping) and self._key in item:
            return str(item[self._key])
        raise ValueError(f"item {index} has no argument {self._key!r} to be its key")


def _line_of(key: str, state: State, failure: BaseException | None) -> _Line:
    left_out: list[str] = []

    def kept(values: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
        found = {}
        for name, value in values.items():
            try:
                found[name] = msgspec.Raw(msgspec.json.encode(value, enc_hook=_plain))
            except (TypeError, ValueError, OverflowError, RecursionError):
                left_out.append(name)
        return found

    sums = state.trace.totals()
    returned = {} if state.returned is None else {"returned": state.returned}
    return _Line(
        key=key,
        arguments=kept(state.arguments),
        variables=kept(state._values()),
        returned=kept(returned).get("returned"),
        error=None if failure is None else _failure_of(failure),
        usage={
            "calls": sums.calls,
            "prompt_tokens": sums.prompt_tokens,
            "cached_tokens": sums.cached_tokens,
            "completion_tokens": sums.completion_tokens,
        },
        left_out=left_out,
    )


def _failure_of(failure: BaseException) -> _Failure:
    if isinstance(failure, GenerationError):
        cause = failure.cause
        return _Failure(type(cause).__name__, str(cause), failure.variable)
    return _Failure(type(failure).__name__, str(failure))


def _restore(state: State, line: _Line, item: object) -> None:
    """Make of a fresh state the one that the line is of."""
    if isinstance(item, Mapping):
        _check_same(line, item)
    state._restore(
        line.arguments,
        {name: Variable.known(name, value) for name, value in line.variables.items()},
        line.returned,
        None if line.error is None else _failure_again(line.error),
    )


def _failure_again(failure: _Failure) -> Exception:
    error = RecordedFailure(f"{failure.type}: {failure.message} (in an earlier run)")
    return error if failure.variable is None else GenerationError(failure.variable, error)


def _check_same(line: _Line, item: Mapping[str, Any]) -> None:
    """The line must be of this item, as far as JSON can tell."""
    for name, before in line.arguments.items():
        if name not in item:
            continue  # a default of the function
        try:
            now = msgspec.json.decode(msgspec.json.encode(item[name], enc_hook=_plain))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
        if now != before:
            raise ValueError(
                f"the item with key {line.key!r} is another one than in the run before: its "
                f"{name!r} is {repr(now)[:80]}, and was {repr(before)[:80]}"
            )


def _plain(value: object) -> object:
    """Pydantic models, sets and the like as what JSON has."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _key_of(line: bytes) -> str:
    try:
        return _key.decode(line).key
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("no line of a batch") from error


def _succeeded(line: bytes) -> bool:
    return _outcome.decode(line).error is None
