"""`octavo models`: its report on families and on checkpoints, including broken ones."""

import functools
import json
import re
import shutil

import pytest
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from octavo.assets import built_in_model_path
from octavo.cli import app
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES, read_architecture
from octavo.models.weight_bytes import weight_bytes


def run(*arguments):
    result = CliRunner().invoke(app, ["models", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def report(path):
    [found] = json.loads(run(path, "--json"))["checkpoints"]
    return found


@pytest.fixture
def built_in(tmp_path):
    """Return a copy of the built-in model that a test may change."""
    return shutil.copytree(built_in_model_path(), tmp_path / "model")


def change(path, **keys):
    config = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_every_family_is_listed_with_its_features(monkeypatch):
    monkeypatch.setattr("octavo.cli.models._in_hub_cache", list)
    listed = json.loads(run("--json"))
    assert listed["architectures"] == sorted(FAMILIES)
    assert listed["parts"].keys() == FAMILIES.keys()
    assert listed["parts"]["Qwen2ForCausalLM"]["always"] == ["grouped-query attention", "attention qkv bias"]
    assert "attention qk norm" in listed["parts"]["Qwen3ForCausalLM"]["always"]
    assert "attention window" in listed["parts"]["Qwen2ForCausalLM"]["optional"]
    shown, verbose = run(), run("--verbose")
    for name in FAMILIES:
        assert re.search(rf"^  {name} +{re.escape(listed['models'][name])}$", shown, re.MULTILINE)
    assert "grouped-query attention" not in shown
    assert re.search(r"^  Qwen2ForCausalLM  +Qwen2, Qwen2.5, QwQ\n +grouped-query attention, ", verbose, re.MULTILINE)
    assert "  Qwen3VLForConditionalGeneration, as Qwen3ForCausalLM\n" in shown


def test_supported_checkpoint_gets_full_report(built_in):
    found = report(built_in)
    architecture = read_architecture(built_in)
    assert (found["verdict"], found["problem"], found["left_out"]) == ("runs", "", [])
    details = found["details"]
    assert details["parameters"] == architecture.num_parameters
    assert details["parts"] == ["grouped-query attention", "attention qk norm head", "tied embeddings"]
    assert details["memory_bytes"] == {
        name: weight_bytes(architecture, architecture.dtype, None, None if name == architecture.dtype else name)
        for name in (architecture.dtype, "int8", "int4", "int4_all")
    }
    assert details["text"]["chat template"] == "default"
    assert "tokens" in details["text"]["tokenizer"]
    shown = run(built_in)
    assert f"{built_in}: runs\n" in shown
    assert f"{architecture.num_parameters:,} parameters" in shown
    assert "architectures\n" not in shown


def test_report_counts_layers_with_sliding_window(tmp_path):
    config = tiny_config(
        "Qwen2ForCausalLM", num_hidden_layers=6, sliding_window=37, use_sliding_window=True, max_window_layers=4
    )
    parts = report(write_checkpoint(tmp_path, config))["details"]["parts"]
    assert parts == ["grouped-query attention", "attention qkv bias", "attention window 37 in 2 of 6 layers"]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("<tool_call>{{ tools }}", "hermes"),
        ("{{ tools }}", "generic (the chat template shows no calls: a system message describes the tools, a grammar "),
        ("{{ messages }}", "generic (the chat template shows no calls: "),
    ],
)
def test_report_names_tool_call_format(marks, expected, built_in):
    (built_in / "chat_template.jinja").write_text(marks)
    assert report(built_in)["details"]["text"]["tool calls"].startswith(expected)


def test_checkpoint_runs_without_chat_template_and_tokenizer(built_in):
    (built_in / "chat_template.jinja").unlink()
    assert report(built_in)["details"]["text"]["chat template"].startswith("none")
    (built_in / "tokenizer.json").unlink()
    found = report(built_in)
    assert found["verdict"] == "runs"
    assert found["details"]["text"]["tokenizer"].startswith("none: ")


def test_checkpoint_without_lm_head_runs_in_part(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM"))
    tensors = {
        n.removeprefix("model."): t for n, t in load_file(path / "model.safetensors").items() if "lm_head" not in n
    }
    save_file(tensors, path / "model.safetensors")
    found = report(path)
    assert found["verdict"] == "runs in part"
    assert "computes embeddings only" in found["left_out"][0]
    assert "left out      tokens: it has no lm_head" in run(path)


def test_image_model_runs_in_part(tmp_path):
    text = tiny_config("Gemma3ForCausalLM")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    write_checkpoint(tmp_path, text)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = report(tmp_path)
    assert (found["verdict"], found["architecture"]) == ("runs in part", "Gemma3ForConditionalGeneration")
    assert found["is_known"]
    assert found["left_out"] == [
        "images: Gemma3ForConditionalGeneration reads them, but octavo serves its text part only"
    ]


def test_gguf_files_are_found_with_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.cli.models._in_hub_cache", list)
    (tmp_path / "below").mkdir()
    write_gguf(
        write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM")), tmp_path / "below" / "whole.gguf"
    )
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "below" / "cut.gguf").write_bytes(b"GGUF")
    (tmp_path / "below" / "whole-00002-of-00002.gguf").write_bytes(b"only the first of several files is listed")
    found = {each["name"]: each for each in json.loads(run(tmp_path, "--json"))["checkpoints"]}
    assert found.keys() == {"octavo-demo (built in)", "whole.gguf", "cut.gguf"}
    assert [found[name]["verdict"] for name in ("whole.gguf", "cut.gguf")] == ["runs", "refused"]


def test_gguf_files_in_hub_cache_are_listed(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--owner--x-GGUF" / "snapshots" / ("0" * 40)
    (snapshot / "BF16").mkdir(parents=True)
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM", vocab_size=288))
    write_gguf(folder, snapshot / "x-F32.gguf")
    write_gguf(folder, snapshot / "BF16" / "x.gguf", kind="BF16", splits=2)
    monkeypatch.setattr(hub, "scan_cache_dir", functools.partial(hub.scan_cache_dir, tmp_path))
    shutil.rmtree(folder)
    found = {each["name"]: each["verdict"] for each in json.loads(run("--json"))["checkpoints"]}
    files = ["owner/x-GGUF x-F32.gguf", "owner/x-GGUF BF16/x-00001-of-00002.gguf"]
    assert [found[name] for name in files] == ["runs", "runs"]
    assert found.keys() == {"octavo-demo (built in)", *files}


def test_report_of_split_gguf_file_sums_sizes_and_names_formats(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM", vocab_size=288))
    path = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0", kinds={"ffn_down": "Q8_0"}, splits=3)
    found = report(path)
    assert found["size_bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*.gguf")) > path.stat().st_size
    assert found["details"]["stored_as"] == "Q4_0, Q8_0"
    assert list(found["details"]["memory_bytes"]) == ["as stored", "int8", "int4", "int4_all"]
    floats = report(write_gguf(folder, tmp_path / "floats.gguf", kind="BF16"))["details"]
    assert (floats["stored_as"], next(iter(floats["memory_bytes"]))) == ("BF16", "bfloat16")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"architectures": ["GPT9"]}, "architectures = ['GPT9']: unknown architecture"),
        ({"num_attention_heads": 7}, "num_key_value_heads = 2: must divide num_attention_heads = 7"),
        ({"hidden_size": "many"}, "hidden_size = 'many': must be an integer"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers = 1073741824: octavo supports at most"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config.quant_method = 'exl2'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ],
)
def test_refused_checkpoint_names_config_key(keys, problem, built_in):
    found = report(change(built_in, **keys))
    assert found["verdict"] == "refused"
    assert found["problem"].startswith(problem)
    assert found["details"] is None
    assert f"because       {problem}" in run(built_in)


def test_report_names_quantized_storage_format(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM", dtype="bfloat16"))
    (path / "model.safetensors").unlink()  # its weights are plain floats
    change(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    details = report(path)["details"]
    assert details["stored_as"] == "FP8 with a scale per 128 x 128 values"
    assert details["memory_bytes"]["bfloat16"] == 2 * details["parameters"]
    change(path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    assert report(path)["details"]["stored_as"] == "int4 (gptq) with a scale per 32 values of a row, act-order"


def test_unreadable_weights_are_refused_in_report_but_not_in_list(built_in):
    for path in built_in.glob("*.safetensors"):
        path.write_bytes(b"no weights")
    found = report(built_in)
    assert (found["verdict"], found["details"]) == ("refused", None)
    assert "is truncated or not a safetensors file" in found["problem"]
    [listed] = [each for each in json.loads(run(built_in.parent, "--json"))["checkpoints"] if each["name"] == "model"]
    assert listed["verdict"] == "runs", "a list is made of what describes them"


@pytest.mark.parametrize("kind", ["folder", "model.gguf"])
def test_weights_with_wrong_shape_are_refused(kind, tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM", vocab_size=288))
    metadata = {"llama.feed_forward_length": 161}
    write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0", changes=metadata)
    change(folder, intermediate_size=161)
    found = report(tmp_path / kind)
    assert found["verdict"] == "refused"
    assert "has shape [160, 64]" in found["problem"] or "has the shape [160, 64]" in found["problem"]


def test_hub_model_runs_with_incomplete_local_weights(built_in, monkeypatch):
    for path in built_in.glob("*.safetensors"):
        path.write_bytes(b"a part")
    monkeypatch.setattr("octavo.startup.checkpoint.resolve_model_path", lambda model, *, weights: built_in)
    assert report("owner/name")["verdict"] == "runs"


def test_checkpoint_without_weights_gets_verdict_runs(built_in):
    for path in built_in.glob("*.safetensors"):
        path.unlink()
    assert report(built_in)["verdict"] == "runs", "as those of a model in the hub do before it is downloaded"


def test_missing_model_path_is_error(tmp_path):
    result = CliRunner().invoke(app, ["models", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "does not exist" in result.stderr


def test_report_on_ranks_has_the_figures_of_the_largest_rank(tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3MoeForCausalLM", vocab_size=512), std=0.1)
    whole = report(path)["details"]
    assert whole["ranks"] is None
    [found] = json.loads(run(path, "-tp", 2, "--json"))["checkpoints"]
    ranks = found["details"]["ranks"]
    assert (ranks["count"], ranks["problem"]) == (2, "")
    assert ranks["kv_bytes_per_token"] == whole["kv_bytes_per_token"] // 2
    for name, size in ranks["memory_bytes"].items():
        assert whole["memory_bytes"][name] / 2 <= size < 0.7 * whole["memory_bytes"][name]
    assert "2 ranks       each about " in run(path, "--tensor-parallel-size", 2, "--enable-expert-parallel")


def test_report_on_ranks_says_why_a_model_cannot_be_divided(tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), std=0.1)
    assert "3 ranks       refused: tensor_parallel_size 3 does not suit a model" in run(path, "-tp", 3)
    assert "refused: enable_expert_parallel needs a mixture of experts" in run(path, "-tp", 2, "-ep")
