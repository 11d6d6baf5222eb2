"""Memory of a process that loads and serves a large GGUF file, compared with the file's size."""

import json
import os
import subprocess
import sys

import pytest
from gguf_large import write_large_gguf
from kernels_available import COMPILED

MIB = 1 << 20
KV_BYTES = 32 * MIB
PAGES_BYTES = 64 * MIB  # of the file, while packing: more if the thread that releases them waits for a core
STEP_BYTES = 64 * MIB  # activations, logits and scratch of the kernels
# A small model is loaded first, so that the memory of libraries is not counted.
MEASURE = """
import gc, json, sys
from pathlib import Path
from octavo import LLM, SamplingParams
from octavo.runtime.process_memory import return_free_memory

def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def load(path):
    return LLM(path, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=256,
               kv_cache_memory_bytes=int(sys.argv[1]))

def serve(llm):
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([[i % 250 + 1] * 130 for i in range(2)], params, use_tqdm=False)

llm = load(sys.argv[2])
serve(llm)
llm.llm_engine.shutdown()
del llm
gc.collect()
return_free_memory()
peaks = []
for _ in range(2):  # packed and kept, then read
    before = status_bytes("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # a new measurement of the peak
    llm = load(sys.argv[3])
    loading = status_bytes("VmHWM:") - before
    serve(llm)
    peaks.append([loading, status_bytes("VmHWM:") - before])
    llm.llm_engine.shutdown()
    del llm
    gc.collect()
    return_free_memory()
print(json.dumps(peaks))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_large_gguf(path, layers=1, kind="Q4_K", vocabulary_kind="Q8_0", vocab_size=512)


@pytest.mark.turn(12)
@pytest.mark.sweep(8)
@pytest.mark.parametrize(("kind", "layers"), [("Q4_K", 16), ("Q8_0", 9)])
@pytest.mark.skipif(not COMPILED or sys.platform != "linux", reason="reads /proc; plain torch works in float64")
def test_gguf_load_keeps_one_copy_of_weights_in_memory(kind, layers, small, tmp_path):
    """Pages of the file are released while they are packed.

    This includes those of the head: a quarter of the file, and its last part. At the first start the pages of the
    stored packed weights are released too. At the second start nothing is packed.
    """
    path = write_large_gguf(tmp_path / "large.gguf", layers=layers, kind=kind, vocabulary_kind="Q8_0")
    size = path.stat().st_size
    assert size > 270e6
    command = [sys.executable, "-c", MEASURE, str(KV_BYTES), str(small), str(path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for loading, serving in json.loads(run.stdout):
        assert size < loading < 1.1 * size + PAGES_BYTES, loading / 1e6
        assert serving < 1.1 * size + KV_BYTES + STEP_BYTES, serving / 1e6
    (kept,) = (tmp_path / "octavo" / "packed").glob("*.packed.safetensors")
    assert 0.99 * size < kept.stat().st_size < 1.1 * size
