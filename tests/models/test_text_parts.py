"""The text part of models of text and images: published configurations, names in either order, and ignored parts."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from sdks import transformers

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.kernels import create_kernels
from octavo.models.loader import load_model
from octavo.models.quantize_checkpoint import quantize_checkpoint
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.startup.launch import ServedModel, make_processors

CPU = torch.device("cpu")
IDS = [(31 * i + 7) % 512 for i in range(60)]
GEMMA3_4B = {  # as published, without keys that do not concern text
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
STYLES = {  # the names of a decoder's tensors before transformers 4.52 and since
    "language_model first": lambda name: f"language_model.{name}",
    "model first": lambda name: name.replace("model.", "model.language_model.", 1),
}


def write_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_whole(directory, part, rename, prefix=""):
    """Write a checkpoint of text and images around a checkpoint of its text part."""
    directory.mkdir()
    text_config = json.loads((part / "config.json").read_text())
    tie = text_config.pop("tie_word_embeddings")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": tie, "eos_token_id": [1, 106]}
    write_config(directory, whole | {"text_config": text_config, "vision_config": {"hidden_size": 64}})
    tensors = {rename(name): tensor for name, tensor in load_file(part / "model.safetensors").items()}
    tensors[f"{prefix}vision_tower.post_layernorm.weight"] = torch.ones(64)
    tensors[f"{prefix}multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(64)
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits_of(path, prompt_logits):
    model = load_model(
        FolderWeights(path), read_architecture(path), create_kernels(CPU, "reference"), dtype="float32", device=CPU,
        max_model_len=128,
    )  # fmt: skip
    return prompt_logits(model, IDS)


def test_published_gemma3_config_gets_class_defaults(tmp_path):
    architecture = read_architecture(write_config(tmp_path, GEMMA3_4B))
    assert (architecture.name, architecture.text_part_of) == ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    assert (architecture.vocab_size, architecture.hidden_size, len(architecture.layers)) == (262208, 2560, 34)
    assert (architecture.dtype, architecture.eos_token_ids) == ("bfloat16", (1, 106))
    assert architecture.tie_word_embeddings
    assert architecture.max_context_tokens == 131072
    near, far = architecture.layers[0].attention, architecture.layers[5].attention
    assert (near.num_heads, near.num_kv_heads, near.head_dim, near.scale) == (8, 4, 256, 1 / 16)
    assert (near.window, near.rope.kind, near.rope.theta) == (1024, "default", 1e4)
    assert (far.window, far.rope.kind, far.rope.factor, far.rope.theta) == (None, "linear", 8.0, 1e6)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tied", [True, False])
def test_multimodal_checkpoint_gives_logits_of_its_text_part(style, tied, tmp_path, prompt_logits):
    config = tiny_config("Gemma3ForCausalLM", tie_word_embeddings=tied)
    part = write_checkpoint(tmp_path / "part", config, seed=5, std=0.1)
    prefix = "model." if style == "model first" else ""
    whole = write_whole(tmp_path / "whole", part, STYLES[style], prefix)
    assert read_architecture(whole).tie_word_embeddings == tied
    assert torch.equal(logits_of(whole, prompt_logits), logits_of(part, prompt_logits))


def test_unknown_tensors_of_multimodal_checkpoint_are_refused(tmp_path):
    part = write_checkpoint(tmp_path / "part", tiny_config("Gemma3ForCausalLM"))
    whole = write_whole(tmp_path / "whole", part, STYLES["language_model first"], prefix="adapter.")
    with pytest.raises(ModelError, match=r"adapter\.\w+.* does not require"):
        FolderWeights(whole).open().check(read_architecture(whole).stored_tensors())


def test_missing_text_config_is_refused(tmp_path):
    config = {name: value for name, value in GEMMA3_4B.items() if name != "text_config"}
    with pytest.raises(ModelError, match=r"text_config = None: Gemma3ForConditionalGeneration needs it"):
        read_architecture(write_config(tmp_path, config))


def test_errors_name_text_config_section(tmp_path):
    config = GEMMA3_4B | {"text_config": GEMMA3_4B["text_config"] | {"hidden_activation": "relu"}}
    with pytest.raises(ModelError, match=r"text_config\.hidden_activation = 'relu'"):
        read_architecture(write_config(tmp_path, config))


def test_quantized_copy_contains_text_part_only(tmp_path, prompt_logits):
    part = write_checkpoint(tmp_path / "part", tiny_config("Gemma3ForCausalLM"), seed=5, std=0.1)
    whole = write_whole(tmp_path / "whole", part, STYLES["model first"], "model.")
    for source in (part, whole):
        quantize_checkpoint(source, tmp_path / f"{source.name}-int8", "int8")
    copy = tmp_path / "whole-int8"
    assert read_architecture(copy).text_part_of is None
    assert torch.equal(logits_of(copy, prompt_logits), logits_of(tmp_path / "part-int8", prompt_logits))


def test_multimodal_model_logs_warning_that_images_are_refused(tmp_path, caplog):
    part = write_checkpoint(tmp_path / "part", tiny_config("Gemma3ForCausalLM"))
    whole = write_whole(tmp_path / "whole", part, STYLES["model first"], "model.")
    for path, messages in ((part, 0), (whole, 1)):
        caplog.clear()
        config = ModelConfig(model=str(path), skip_tokenizer_init=True)
        with caplog.at_level(logging.WARNING):
            make_processors(config, ServedModel.find(config))
        assert (
            sum("serves its text part and refuses images" in each.getMessage() for each in caplog.records) == messages
        )


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "patch_size": 14}
GEMMA4_VISION = {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
MROPE = {"mrope_section": [4, 2, 2]}
QWEN3_5 = {
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
QWEN3_5_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 1, "out_hidden_size": 64}


def without(config, *keys):
    """Return a copy without some keys."""
    return {key: value for key, value in config.items() if key not in keys}


WHOLES = {  # text parts of other models, and the configurations around them; rope parameters are as on the hub
    "mistral": (
        "Mistral3ForConditionalGeneration",
        tiny_config("MistralForCausalLM"),
        {"model_type": "mistral3", "vision_config": VISION | {"model_type": "pixtral", "num_hidden_layers": 1}},
    ),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        tiny_config("Ministral3ForCausalLM", tie_word_embeddings=True)
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            }
        },
        {"model_type": "mistral3", "vision_config": VISION | {"model_type": "pixtral", "num_hidden_layers": 1}},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        tiny_config("LlamaForCausalLM"),
        {
            "model_type": "llava",
            "vision_config": VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 28},
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        tiny_config("Gemma4ForCausalLM", tie_word_embeddings=True, pad_token_id=0),
        {
            "model_type": "gemma4",
            "vision_config": VISION | GEMMA4_VISION | {"model_type": "gemma4_vision"},
            "audio_config": {
                "model_type": "gemma4_audio",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "output_proj_dims": 32,
            },
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedForConditionalGeneration",
        tiny_config("Gemma4UnifiedForCausalLM", tie_word_embeddings=True, pad_token_id=0),
        {"model_type": "gemma4_unified"},
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        tiny_config("Qwen2ForCausalLM")
        | {"model_type": "qwen2_vl_text", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **MROPE}},
        {"model_type": "qwen2_vl", "vision_config": {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "depth": 1}},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        tiny_config("Qwen2ForCausalLM")
        | {"model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **MROPE}},
        {
            "model_type": "qwen2_5_vl",
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "depth": 1,
                "out_hidden_size": 64,
            },
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        tiny_config("Qwen3_5ForCausalLM") | QWEN3_5,
        {"model_type": "qwen3_5", "vision_config": QWEN3_5_VISION},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForConditionalGeneration",
        without(tiny_config("Qwen3_5MoeForCausalLM"), "intermediate_size", "decoder_sparse_step") | QWEN3_5,
        {"model_type": "qwen3_5_moe", "vision_config": QWEN3_5_VISION},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        tiny_config("Qwen3ForCausalLM")
        | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_interleaved": True, **MROPE},
        },
        {
            "model_type": "qwen3_vl",
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "depth": 1,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", WHOLES)
def test_text_logits_equal_transformers_multimodal_model(name, tmp_path, prompt_logits):
    """A complete checkpoint as transformers writes it, including the vision part, is used for text alone."""
    whole, text_config, around = WHOLES[name]
    config = transformers.AutoConfig.for_model(
        **around, text_config=text_config, tie_word_embeddings=text_config["tie_word_embeddings"]
    )
    torch.manual_seed(3)
    oracle = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in oracle.model.language_model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 10 + (parameter.dim() == 1))
    oracle.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [whole]
    architecture = read_architecture(tmp_path)
    assert architecture.text_part_of == whole
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([IDS])).logits[0]
        ours = logits_of(tmp_path, prompt_logits)
    assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Qwen3_5ForCausalLM", "mtp.fc.weight"),
        ("NemotronHForCausalLM", "mtp.layers.1.mixer.experts.0.up_proj.weight"),
    ],
)
def test_layers_of_multi_token_prediction_are_not_loaded(family, extra, tmp_path, caplog):
    """Both families store them after the other layers."""
    path = write_checkpoint(tmp_path / "model", tiny_config(family))
    tensors = load_file(path / "model.safetensors") | {extra: torch.zeros(64, 128)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO"):
        FolderWeights(path).open().check(read_architecture(path).stored_tensors())
    assert "mtp is not loaded" in caplog.text


def test_text_config_keys_are_read_from_top_level(tmp_path):
    """Qwen2.5-VL as published."""
    config = tiny_config("Qwen2ForCausalLM") | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", **MROPE},
        "rope_theta": 1e6,
        "vision_config": {"depth": 1},
    }
    del config["rope_parameters"]
    architecture = read_architecture(write_config(tmp_path, config))
    assert (architecture.name, architecture.layers[0].attention.rope.theta) == ("Qwen2ForCausalLM", 1e6)


def test_text_config_of_wrong_model_type_is_refused(tmp_path):
    config = GEMMA3_4B | {"text_config": GEMMA3_4B["text_config"] | {"model_type": "gemma4_text"}}
    with pytest.raises(ModelError, match=r"text_config\.model_type = 'gemma4_text': octavo serves gemma3_text"):
        read_architecture(write_config(tmp_path, config))
