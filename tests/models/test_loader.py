"""Loading: whole and sharded checkpoints, dummy weights, dtypes, bytes, and every kind of broken input."""

import json
import math
import pickle
import subprocess
import sys

import httpx
import pytest
import torch
from kernels_available import COMPILED
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from octavo.config import kernels_required
from octavo.errors import ModelError
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import activation_dtype, load_model
from octavo.models.model_path import resolve_model_path
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES, read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BIASED = {"attention_bias": True, "mlp_bias": True}
# Granite and Gemma 4 multiply scores by 1: such a softmax picks one token, and rounding may pick another one. Rounding
# may also choose another expert, unless all are chosen.
SCALED = {
    "Glm4MoeForCausalLM": {"num_experts_per_tok": 8},
    "Lfm2MoeForCausalLM": {"num_experts_per_tok": 8},
    "Qwen3NextForCausalLM": {"num_experts_per_tok": 8},
    "Qwen3_5MoeForCausalLM": {"num_experts_per_tok": 8},
    "GraniteForCausalLM": {"attention_multiplier": 0.25},
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "top_k_experts": 8,
    },
}
# Factors of the error: a layer has experts, an MLP, and embeddings, or recurrent layers add up errors of earlier rows.
RECURRENT = (
    "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "NemotronHForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
)  # fmt: skip
MORE_MATRICES = {"Gemma4ForCausalLM": 1.2} | dict.fromkeys(RECURRENT, 1.6)


class CosineSizes(TorchFunctionMode):
    """Records the number of elements of each call of torch's cosine."""

    def __init__(self):
        self.sizes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "cos":
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def load(path, dtype="float32", **options):
    architecture = read_architecture(path)
    kernels = ReferenceKernels()
    return load_model(FolderWeights(path), architecture, kernels, dtype=dtype, device=CPU, max_model_len=64, **options)


LINEARS = (
    "qkv", "o", "q_b", "k_b", "v_b", "gate_up", "up", "down", "router", "shared_gate_up", "shared_down", "shared_gate",
    "gate", "projection", "inputs", "rates", "out",
)  # fmt: skip
NORMS = (
    "added", "stream", "q_norm", "k_norm", "kv_norm", "sinks", "choice_bias", "expert_scale", "router_norm", "norm",
    "taps", "decay", "dt_bias", "conv_bias", "skip",
)  # fmt: skip


def packed_bytes(model):
    """Return the bytes of all weights that a model keeps: linear layers, norms."""
    linears, norms = [model.embed_tokens], [model.first_norm]
    if model.lm_head is not model.embed_tokens:
        linears.append(model.lm_head)
    parts = [model.layer_inputs]
    for layer in model.layers:
        parts += [layer.attention, layer.mlp, layer.embedding]
        parts += [getattr(layer.mlp, name, None) for name in ("shared", "experts")]
        parts += [layer.after_attention, layer.after_mlp, layer.after_embedding]
        norms += getattr(layer.mlp, "norms", ())
    linears += [each for part in parts for name in LINEARS if (each := getattr(part, name, None)) is not None]
    norms += [getattr(part, name, None) for part in parts for name in NORMS]
    numbers = sum(layer.stream_scale for layer in model.architecture.layers)
    of_norms = sum(norm.nbytes for norm in norms if norm is not None) + 4 * numbers
    return sum(linear.num_bytes for linear in linears) + of_norms


@pytest.mark.sweep(192)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4_all"])
def test_computed_weight_bytes_equal_allocated_bytes(name, tied, dtype, quantization, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config(name, tie_word_embeddings=tied, **BIASED))
    model = load(path, dtype, quantization=quantization)
    norm_dtype = "float32" if dtype == "float16" else dtype
    architecture = model.architecture
    assert packed_bytes(model) == weight_bytes(architecture, dtype, norm_dtype, quantization)
    attentions = [layer.attention for layer in model.layers if hasattr(layer.attention, "cos_sin")]
    tables = {(each.config.rope, each.config.rotary_width): each.cos_sin for each in attentions}
    assert all(each.cos_sin is tables[each.config.rope, each.config.rotary_width] for each in attentions)
    for (rope, width), table in tables.items():
        turned = 0 if rope is None else rope.rotary_dim(width)
        assert table.nbytes == 64 * turned * 4
    assert model.dtype == activation_dtype(dtype, CPU)


def test_first_cosine_is_computed_on_one_thread(tmp_path):
    """MKL chooses its code at the first call without a lock: several threads could get wrong code for a rotary
    table.
    """
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    with CosineSizes() as cosines:
        load(path)
    assert cosines.sizes[0] == 1
    assert max(cosines.sizes) > 1


@pytest.mark.skipif(not COMPILED and not kernels_required(), reason="octavo was installed without compiled kernels")
@pytest.mark.parametrize("quantization", [None, "int4_all"])
def test_compiled_kernels_allocate_computed_bytes(tmp_path, quantization):
    """The kernels pad rows to panels of 32 and keep biases in float32; with these dimensions, only the biases
    differ.
    """
    cpu = pytest.importorskip("octavo.kernels.cpu")
    config = tiny_config("Qwen3ForCausalLM", hidden_size=64, intermediate_size=160, vocab_size=512)
    path = write_checkpoint(tmp_path, config)
    architecture = read_architecture(path)
    model = load_model(
        FolderWeights(path), architecture, cpu.CpuKernels(num_threads=1), dtype="bfloat16", device=CPU,
        max_model_len=64, quantization=quantization,
    )  # fmt: skip
    assert packed_bytes(model) == weight_bytes(architecture, "bfloat16", quantization=quantization)


def test_sharded_checkpoint_equals_single_file(tmp_path, prompt_logits):
    config = tiny_config("Qwen2ForCausalLM")
    whole = write_checkpoint(tmp_path / "whole", config, std=0.1)
    sharded = write_checkpoint(tmp_path / "sharded", config, std=0.1, max_shard_bytes=60_000)
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    assert torch.equal(prompt_logits(load(whole), PROMPT), prompt_logits(load(sharded), PROMPT))
    (sharded / "model.safetensors.index.json").unlink()
    assert torch.equal(prompt_logits(load(whole), PROMPT), prompt_logits(load(sharded), PROMPT))


@pytest.mark.sweep(48)
@pytest.mark.skipif(not COMPILED and not kernels_required(), reason="octavo was installed without compiled kernels")
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.05), ("int4", 0.35), ("int4_all", 0.43)])
@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_logits_are_close_to_exact_in_both_backends(name, quantization, error, tmp_path, prompt_logits):
    cpu, error = pytest.importorskip("octavo.kernels.cpu"), error * MORE_MATRICES.get(name, 1.0)
    config = tiny_config(name, tie_word_embeddings=True, **BIASED, **SCALED.get(name, {}))
    path = write_checkpoint(tmp_path, config, std=0.1)
    options = {"dtype": "float32", "device": CPU, "max_model_len": 64, "quantization": quantization}
    compiled = load_model(FolderWeights(path), read_architecture(path), cpu.CpuKernels(num_threads=1), **options)
    exact, plain = prompt_logits(load(path), PROMPT), prompt_logits(load(path, quantization=quantization), PROMPT)
    assert 0 < (plain - exact).norm() < error * exact.norm()
    torch.testing.assert_close(prompt_logits(compiled, PROMPT), plain, rtol=0, atol=0.02 * exact.abs().max().item())


def test_chunked_prefill_logits_match_whole_prompt(tmp_path, prompt_logits):
    path = write_checkpoint(tmp_path, tiny_config("MistralForCausalLM", sliding_window=5), std=0.1)
    model = load(path)
    whole = prompt_logits(model, PROMPT * 3)
    for step, block_size in ((1, 3), (7, 4), (16, 16)):
        torch.testing.assert_close(prompt_logits(model, PROMPT * 3, step, block_size), whole, rtol=1e-4, atol=1e-4)


def test_dummy_weights_depend_only_on_seed(tmp_path, prompt_logits):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM")))
    first = prompt_logits(load(tmp_path, load_format="dummy", seed=1), PROMPT)
    assert torch.equal(first, prompt_logits(load(tmp_path, load_format="dummy", seed=1), PROMPT))
    assert not torch.equal(first, prompt_logits(load(tmp_path, load_format="dummy", seed=2), PROMPT))
    assert first.isfinite().all()


def test_dummy_weights_equal_random_checkpoint_of_same_seed(tmp_path, prompt_logits):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"), seed=3)
    assert torch.equal(
        prompt_logits(load(path), PROMPT), prompt_logits(load(path, load_format="dummy", seed=3), PROMPT)
    )


def test_float16_weights_compute_in_float32_on_cpu(tmp_path, prompt_logits):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", dtype="float16"), std=0.1)
    half = load(path, "float16")
    assert half.dtype == torch.float32
    assert half.layers[0].mlp.down.storage.dtype == torch.float16
    torch.testing.assert_close(prompt_logits(half, PROMPT), prompt_logits(load(path), PROMPT), rtol=1e-5, atol=1e-5)
    assert activation_dtype("float16", torch.device("cuda")) == torch.float16


def test_tied_weights_are_stored_once(tmp_path):
    tied = load(write_checkpoint(tmp_path / "tied", tiny_config("LlamaForCausalLM", tie_word_embeddings=True)))
    assert tied.lm_head is tied.embed_tokens
    untied = load(write_checkpoint(tmp_path / "untied", tiny_config("LlamaForCausalLM")))
    assert untied.lm_head is not untied.embed_tokens


def test_packed_weights_ignore_later_file_changes(tmp_path, prompt_logits):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"), std=0.1)
    model = load(path)
    before = prompt_logits(model, PROMPT)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-100_000, 2)
        file.write(b"\0" * 100_000)
    assert torch.equal(prompt_logits(model, PROMPT), before)


def test_progress_counts_packed_bytes(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen2ForCausalLM"))
    calls = []
    model = load(path, "bfloat16", progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == len(model.architecture.tensor_shapes())
    assert calls == sorted(set(calls))
    assert calls[-1] == (packed_bytes(model), packed_bytes(model))


@pytest.mark.turn(12)
def test_loading_peak_memory_is_close_to_packed_weights(tmp_path):
    """Private memory grows by little more than the packed weights: originals are released as they are packed."""
    config = tiny_config(
        "LlamaForCausalLM", hidden_size=512, intermediate_size=1536, num_hidden_layers=12, head_dim=64,
        num_attention_heads=8,
    )  # fmt: skip
    path = write_checkpoint(tmp_path, config)
    code = f"""
import pathlib, resource, sys
import torch
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import load_model
from octavo.models.registry import read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights
def private(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
path = pathlib.Path({str(path)!r})
architecture = read_architecture(path)
load = lambda: load_model(FolderWeights(path), architecture, ReferenceKernels(), dtype="float32",
    device=torch.device("cpu"), max_model_len=64, progress=lambda done, total: peaks.append(private("RssAnon")))
peaks = []
before = private("RssAnon")
model = load()
print((max(peaks) - before) / weight_bytes(architecture, "float32"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.9 < float(result.stdout) < 1.15


@pytest.fixture(scope="module")
def checkpoint_of_150_mb(tmp_path_factory):
    config = tiny_config(
        "LlamaForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, head_dim=64,
        num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    return write_checkpoint(tmp_path_factory.mktemp("large") / "llama", config)


@pytest.mark.turn(12)
@pytest.mark.sweep(16)
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4_all"])
@pytest.mark.skipif(not COMPILED or sys.platform != "linux", reason="reads /proc; plain torch works in float64")
def test_loading_and_serving_memory_stay_within_bounds(checkpoint_of_150_mb, quantization):
    """The files' pages count too: the peak of loading is close to the final memory of weights, KV and libraries."""
    path = checkpoint_of_150_mb
    code = """
import json, pathlib, sys
import torch
from octavo import LLM, SamplingParams
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
libraries = status("VmRSS:")
llm = LLM(sys.argv[1], quantization=json.loads(sys.argv[2]), dtype="bfloat16", skip_tokenizer_init=True,
          max_model_len=256, max_num_seqs=16, kv_cache_memory_bytes=64 << 20, packed_cache_bytes=0)
peak, loaded = status("VmHWM:"), status("VmRSS:")
prompts = [[i % 500 + 1] * 130 for i in range(16)]  # which fill a step
llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), use_tqdm=False)
print(json.dumps([peak, loaded, status("VmRSS:") - libraries]))
"""
    command = [sys.executable, "-c", code, str(path), json.dumps(quantization)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, loaded, serving = json.loads(result.stdout)
    num_weights = sum(math.prod(shape) for shape in read_architecture(path).tensor_shapes().values())
    weights = num_weights * {None: 2, "int8": 1, "int4": 4.5 / 8, "int4_all": 4.5 / 8}[quantization]
    assert peak < 1.3 * loaded, (peak / 1e6, loaded / 1e6)
    assert serving < weights + (64 << 20) + 150e6, serving / 1e6


def test_missing_unexpected_or_misshapen_weights_are_refused(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen2ForCausalLM"))
    file = path / "model.safetensors"
    tensors = load_file(file)

    def refused(changed, *words):
        save_file(changed, file)
        with pytest.raises(ModelError) as caught:
            load(path)
        for word in (str(path), *words):
            assert word in str(caught.value)

    name = "model.layers.1.mlp.up_proj.weight"
    refused({key: value for key, value in tensors.items() if key != name}, name, "missing")
    refused({key: value for key, value in tensors.items() if "proj" not in key}, "and 17 more", "missing")
    refused(tensors | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, "self_attn.sinks", "does not require")
    refused(tensors | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, "o_proj.bias", "does not require")
    refused(tensors | {name: torch.zeros(160, 65)}, name, "[160, 65]", "[160, 64]")
    refused(tensors | {name: torch.zeros(160, 64, dtype=torch.int8)}, name, "I8", "quantized")
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(tensors | harmless, file)
    load(path)


def test_tied_checkpoint_with_equal_lm_head_loads(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", tie_word_embeddings=True))
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    load(path)


def test_tied_checkpoint_with_different_lm_head_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", tie_word_embeddings=True))
    tensors = load_file(path / "model.safetensors")
    for other in (tensors["model.embed_tokens.weight"].flip(0), torch.zeros(3)):
        save_file(tensors | {"lm_head.weight": other.contiguous()}, path / "model.safetensors")
        with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embeddings.* tie_word_embeddings"):
            load(path)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_safetensors_file_is_refused(kept, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(path)


def test_non_safetensors_file_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    (path / "model.safetensors").write_bytes(pickle.dumps({"a": list(range(1000))}))
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM")))
    (tmp_path / name).write_bytes(b"never read")
    with pytest.raises(ModelError, match="pickle can run code") as caught:
        load(tmp_path)
    assert name in str(caught.value)


def test_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("LlamaForCausalLM")))
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        load(tmp_path)


def test_broken_shard_index_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"), max_shard_bytes=60_000)
    index = path / "model.safetensors.index.json"
    text = index.read_text()

    def refused(changed, words):
        index.write_text(changed)
        with pytest.raises(ModelError, match=words):
            load(path)

    refused(text[:-20], "not valid JSON")
    refused("{}", "weight_map")
    refused(text.replace("model-00001-of", "../model-00001-of"), "not a plain file name")
    refused(text.replace("model-00001-of", "model-00099-of"), r"model-00099-of-\d+\.safetensors is missing")


def test_tensor_in_two_files_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, path / "b.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is also in a\.safetensors"):
        load(path)


def test_resolve_model_path_accepts_folders_and_refuses_missing_paths(tmp_path, monkeypatch):
    assert resolve_model_path(tmp_path) == tmp_path
    assert resolve_model_path(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_path(tmp_path / "file")
    for missing in (tmp_path / "missing", str(tmp_path / "missing"), "./missing", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model_path(missing)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'octavo\[hub\]'"):
        resolve_model_path("some-owner/some-model")


def test_hub_id_without_config_is_refused_with_download_hint(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda _model, **_: str(tmp_path))
    with pytest.raises(
        ModelError, match=r"some-owner/x-GGUF has neither config.json .*: hf download some-owner/x-GGUF "
    ):
        resolve_model_path("some-owner/x-GGUF")
    (tmp_path / "tokenizer.json").write_text("{}")  # maybe the only requested file
    assert resolve_model_path("some-owner/x-GGUF") == tmp_path


def test_uncached_hub_id_is_refused_offline(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="some-owner/some-model") as caught:
        resolve_model_path("some-owner/some-model")
    assert "\n" not in str(caught.value)


def test_hub_download_skips_weights_of_other_programs(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "snapshot_download", lambda _model, **options: asked.update(options) or str(tmp_path))
    assert resolve_model_path("some-owner/some-model", "v2") == tmp_path
    kept = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tool_use.jinja"]
    others = [
        "consolidated.safetensors",
        "consolidated-00001.safetensors",
        "onnx/model.safetensors",
        "a/b/c.safetensors",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(hub.utils.filter_repo_objects([*kept, *others, "model.bin"], **patterns)) == kept
    assert asked["revision"] == "v2"
    resolve_model_path("some-owner/some-model", weights=False)
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(hub.utils.filter_repo_objects([*kept, *others], **patterns)) == [kept[0], kept[2]]


@pytest.mark.parametrize("error", [httpx.ProxyError("no way\nthrough"), httpx.InvalidURL("no way"), OSError("no way")])
def test_hub_errors_are_one_line(error, monkeypatch):
    """The hub's client also raises errors other than OSError."""
    hub = pytest.importorskip("huggingface_hub")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"some-owner/some-model.*no way$"):
        resolve_model_path("some-owner/some-model")
