"""A large GGUF file of random blocks, written tensor by tensor without float weights to round."""

import gguf
import torch
from gguf_files import add, byte_vocabulary

from octavo.kernels.block_weight import BlockKind, random_blocks


def write_large_gguf(
    path, *, layers, kind, vocabulary_kind, hidden_size=1024, intermediate_size=4096, vocab_size=65536
):
    """Write a Llama with heads of 64, eight of them for keys, and layers and vocabulary in blocks. Return its path."""
    writer, generator = gguf.GGUFWriter(path, "llama"), torch.Generator().manual_seed(0)
    metadata = {
        "block_count": layers,
        "context_length": 2048,
        "embedding_length": hidden_size,
        "feed_forward_length": intermediate_size,
        "attention.head_count": hidden_size // 64,
        "attention.head_count_kv": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
    }
    for key, value in ({f"llama.{key}": value for key, value in metadata.items()} | byte_vocabulary(288)).items():
        add(writer, key, value)

    made = {}  # all layers are equal

    def matrix(name, in_kind, *shape):
        if (in_kind, shape) not in made:
            made[in_kind, shape] = random_blocks(generator, BlockKind[in_kind], *shape).rows.numpy()
        writer.add_tensor(f"{name}.weight", made[in_kind, shape], raw_dtype=gguf.GGMLQuantizationType[in_kind])

    matrix("token_embd", vocabulary_kind, vocab_size, hidden_size)
    matrix("output", vocabulary_kind, vocab_size, hidden_size)
    norms = ["output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(layers) for part in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", torch.ones(hidden_size).numpy())
    for layer in range(layers):
        shapes = {
            "attn_q": (hidden_size, hidden_size),
            "attn_k": (512, hidden_size),
            "attn_v": (512, hidden_size),
            "attn_output": (hidden_size, hidden_size),
            "ffn_gate": (intermediate_size, hidden_size),
            "ffn_up": (intermediate_size, hidden_size),
            "ffn_down": (hidden_size, intermediate_size),
        }
        for part, shape in shapes.items():
            matrix(f"blk.{layer}.{part}", kind, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
