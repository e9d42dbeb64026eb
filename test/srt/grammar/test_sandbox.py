"""Work in a sandbox ends in an answer or in an error, and the next call is served."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# A sandbox is forked by a process that has no threads yet, so each test has one of its own.
PRELUDE = """
    import os, sys, threading
    from phloem.srt.grammar.sandbox import OverLimit, Sandbox

    def handle(request):
        if request == b"hang":
            while True:
                pass
        if request == b"sleep":
            threading.Event().wait()
        if request == b"eat":
            return bytes(4 << 30)
        if request == b"raise":
            raise ValueError("no")
        if request == b"die":
            os.kill(os.getpid(), 9)
        if request == b"pid":
            return str(os.getpid()).encode()
        return request[::-1]

    def refused(request):
        try:
            sandbox.call(request)
        except OverLimit:
            return True
        return False

    sandbox = Sandbox(handle, cpu_seconds=1, memory_bytes=1 << 30)
"""


def run(script: str) -> None:
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_answers_of_any_size() -> None:
    run("""
        for size in (0, 1, 5_000_000):
            assert sandbox.call(b"ab" * size) == b"ba" * size
        sandbox.close()
    """)


@pytest.mark.parametrize("bomb", ["hang", "eat", "raise", "die", "sleep"])
def test_a_bomb_costs_its_own_call_alone(bomb: str) -> None:
    run(f"""
        before = sandbox.call(b"pid")
        assert refused(b"{bomb}")
        assert sandbox.call(b"abc") == b"cba"
        assert sandbox.call(b"pid") != before
        assert refused(b"{bomb}")
        assert sandbox.call(b"abc") == b"cba"
        sandbox.close()
    """)


def test_a_call_is_waited_for_no_longer_than_wanted() -> None:
    """Also when its child has hardly begun: then the news of its death is not the next call's."""
    run("""
        sandbox.close()
        sandbox = Sandbox(handle, cpu_seconds=60, memory_bytes=1 << 30, wait_seconds=0.01)
        for _ in range(20):
            assert refused(b"hang")
        sandbox._wait_s = 30.0
        assert sandbox.call(b"abc") == b"cba"
        sandbox.close()
    """)


def test_calls_of_several_threads_are_kept_apart() -> None:
    run("""
        def work(i):
            for k in range(50):
                text = f"{i}-{k}".encode()
                assert sandbox.call(text) == text[::-1]
                done.append(1)
        done = []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert len(done) == 200
        sandbox.close()
    """)


def test_nothing_is_left_behind() -> None:
    """Neither when it is closed, nor when its owner dies."""
    run("""
        import psutil, signal, time
        child = int(sandbox.call(b"pid"))
        nursery = psutil.Process(child).ppid()
        sandbox.close()
        assert not psutil.pid_exists(nursery)
        end = time.monotonic() + 30
        while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
            assert time.monotonic() < end

        owner = os.fork()
        if owner == 0:
            sandbox = Sandbox(handle, cpu_seconds=1, memory_bytes=1 << 30)
            os.write(1, sandbox.call(b"pid"))
            os._exit(0)
        os.waitpid(owner, 0)
    """)
