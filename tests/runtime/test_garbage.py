"""Permanent objects are not traversed by the collector again, and its settings are restored."""

import subprocess
import sys
import textwrap

import pytest


def in_a_process_of_its_own(code: str) -> str:
    """Run code in a new process, because the collector belongs to the whole process. Return its output."""
    code = "import gc, weakref\nfrom octavo.runtime.garbage import permanent_generation\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_permanent_objects_are_frozen_and_garbage_is_collected():
    shown = in_a_process_of_its_own("""
        class Thing: pass
        with permanent_generation():
            assert not gc.isenabled()
            kept, garbage = [Thing() for _ in range(1000)], Thing()
            garbage.itself, seen = garbage, weakref.ref(garbage)
            del garbage
        num_looked_at = sum(len(gc.get_objects(generation)) for generation in range(3))
        print(gc.isenabled(), gc.get_freeze_count() > 1000, seen() is None, num_looked_at < 1000)
    """)
    assert shown == "True True True True"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects in increments")
def test_permanent_objects_do_not_delay_full_collection():
    """Python waits until new objects are a quarter of all objects. Permanent ones do not count for this."""
    shown = in_a_process_of_its_own("""
        with permanent_generation():
            kept = [[] for _ in range(1_000_000)]
        before = gc.get_stats()[2]["collections"]
        later = [[] for _ in range(150_000)]
        print(gc.get_stats()[2]["collections"] > before)
    """)
    assert shown == "True"


@pytest.mark.parametrize("was_enabled", [True, False])
def test_exception_restores_garbage_collector_state(was_enabled):
    shown = in_a_process_of_its_own(f"""
        gc.enable() if {was_enabled} else gc.disable()
        try:
            with permanent_generation():
                raise KeyError
        except KeyError:
            print(gc.isenabled(), gc.get_freeze_count())
    """)
    assert shown == f"{was_enabled} 0"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects in increments")
def test_rare_collections_make_no_full_collection_for_half_a_million_objects():
    shown = in_a_process_of_its_own("""
        from octavo.runtime.garbage import rare_collections
        def num_full(count):
            before, kept = gc.get_stats()[2]["collections"], [[] for _ in range(count)]
            return gc.get_stats()[2]["collections"] - before
        with permanent_generation():
            thresholds = gc.get_threshold()
        often = num_full(500_000)
        gc.collect()
        with rare_collections():
            rarely, sometimes = num_full(500_000), num_full(3_000_000)
        print(often > 2, rarely, sometimes > 0, gc.get_threshold() == thresholds)
    """)
    assert shown == "True 0 True True"
