"""Real GGUF files: ids of llama.cpp, the tokens of the same model in a folder, and answers that make sense."""

import random
import re
from pydoc_data.topics import topics

import pytest
import torch
from gguf_files import write_gguf
from triton_interpreter import interpreted_kernels

from octavo import LLM, SamplingParams
from octavo.engine.gguf_tokenizer import GGUFVocabulary
from octavo.kernels.block_weight import BlockWeight
from octavo.kernels.quantization import linear_blocks
from octavo.models.gguf_file import GGUFFile
from octavo.startup.checkpoint import open_checkpoint

DECODERS = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
UNTOLD = ("aquila", "baichuan", "gpt-neox")  # decoders too, but without published ids
QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.", "Why is the sky blue?")
NUM_TEXTS = 3000


def vocabulary_of(path):
    return GGUFVocabulary(path, GGUFFile.read(path).metadata)


@pytest.mark.parametrize("vocabulary", DECODERS)
def test_gguf_tokenizer_ids_equal_llama_cpp(real_vocabularies, vocabulary):
    path = real_vocabularies[vocabulary]
    tokenizer = vocabulary_of(path).build()
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = path.with_name(f"{path.name}.out").read_text().splitlines()
    assert len(texts) > 40
    for text, line in zip(texts, ids, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(id_) for id_ in line.split()], text


@pytest.mark.parametrize("vocabulary", UNTOLD)
def test_gguf_tokenizers_without_published_ids_round_trip_text(real_vocabularies, vocabulary):
    tokenizer = vocabulary_of(real_vocabularies[vocabulary]).build()
    for text in random_texts(50):
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert decoded == text or (vocabulary == "baichuan" and decoded.strip() == text.strip())


def random_texts(count):
    rng, lines = random.Random(0), [line for each in topics.values() for line in each.splitlines()]
    letters = (
        "".join(lines)
        + "  \n\n\t0123456789äöüßéñ日本語中文\u0627\u0644\u0639\u0631हिन्दी한국어"
        + "\U0001f600\U0001f468\u200d\U0001f469\u0301"
    )
    for _ in range(count):
        made = "".join(rng.choices(letters, k=rng.randrange(1, 60)))
        yield rng.choice([made, rng.choice(lines), f"{rng.choice(lines)}{rng.choice(lines)}", f" {made}\n"])


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_gguf_tokenizer_equals_tokenizer_of_safetensors_folder(real_gguf, real_tokenizer, real_scale, model):
    ours, theirs = open_checkpoint(real_gguf(model)).read_tokenizer(), real_tokenizer(model)
    special = [token for token in theirs.special_tokens.values() if ours.token_id(token) == theirs.token_id(token)]
    assert {"smollm2": "<|im_end|>", "gemma3": "<eos>"}[model] in special
    texts = list(random_texts(round(NUM_TEXTS * real_scale)))
    if model == "smollm2":  # transformers' tokenizer, unlike this one, does not split all digits
        texts = [re.sub(r"\d", "", text) for text in texts]
    else:  # it merges spaces, while SentencePiece takes the longest token of them: 31
        texts = [re.sub(" {32,}", " " * 31, text) for text in texts]
    texts += [f"{text}{random.Random(text).choice(special)}{text}" for text in texts[:100]]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_packed_gpu_blocks_equal_gguf_weights(real_gguf, model):
    """Some matrices of each type are packed without loss.

    A product with a part of one runs in Triton's interpreter.
    """
    pytest.importorskip("triton")
    from octavo.kernels.triton.packed_blocks import PackedBlocks

    checkpoint, of_kind = open_checkpoint(real_gguf(model)), {}
    files = checkpoint.weights.open()
    for name in checkpoint.read_architecture().tensor_shapes():
        if isinstance(weight := files.weight(name), BlockWeight):
            of_kind.setdefault(weight.kind, []).append(weight)
    assert len(of_kind) == {"smollm2": 2, "gemma3": 4}[model]
    with interpreted_kernels() as kernels:
        for weights in of_kind.values():
            for weight in weights[::10]:
                ids = torch.arange(0, weight.shape[0], 7)
                assert torch.equal(PackedBlocks.pack([weight]).rows(ids), weight.select_rows(ids).dequantize())
            part = weights[0].select_rows(slice(0, 20))
            x = torch.randn(2, part.in_features, generator=torch.Generator().manual_seed(0))
            assert torch.equal(kernels.linear(x, kernels.pack_linear([part])), linear_blocks(x, part))


def answers_of(path, **options):
    llm = LLM(str(path), max_model_len=512, **options)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.chat(chats, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return [(output.prompt_token_ids, list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]


def test_quantized_smollm2_answers_like_llama_cpp(real_gguf):
    """Activations are rounded per block, as in llama.cpp, and these are the words of llama.cpp."""
    answers = answers_of(real_gguf("smollm2"))
    assert answers[0][2].startswith("L'Étoile, la ")  # with float activations it would be Paris, by a tiny margin
    llm = LLM(str(real_gguf("smollm2")), max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4)
    [output] = llm.generate(["The capital of France is"], params, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris.")


def test_float_gguf_gives_tokens_of_safetensors(real_model, real_gguf, tmp_path):
    """The file has the tokenizer and the template of the real file."""
    folder = real_model("smollm2")
    metadata = GGUFFile.read(real_gguf("smollm2")).metadata
    said = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    path = write_gguf(folder, tmp_path / "smollm2.gguf", changes=said)
    assert answers_of(path, dtype="float32") == answers_of(folder, dtype="float32")
    path.unlink()


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_split_long_text_gives_same_gguf_token_ids(real_gguf, model):
    tokenizer = open_checkpoint(real_gguf(model)).read_tokenizer()
    text = "\n\n".join(topics.values())[:200_000]
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.encode_end(text, 100) == ids[-100:]
