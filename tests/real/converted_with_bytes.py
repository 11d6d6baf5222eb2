"""Run llama.cpp's converter with a vocabulary of bytes, for checkpoints that have no tokenizer.

python converted_with_bytes.py LLAMA_CPP CHECKPOINT OUTPUT
"""

import importlib
import pkgutil
import sys
from pathlib import Path

MODULES = {"qwen", "llama", "olmo", "gpt_oss", "mistral", "deepseek", "glm", "granite", "gemma", "lfm2", "nemotron"}


def main() -> None:
    root, checkpoint, output = sys.argv[1:]
    tests = Path(__file__).parents[1]
    sys.path[:0] = [root, f"{root}/gguf-py", str(tests)]
    import convert_hf_to_gguf
    import gguf_files
    from conversion import base

    def set_vocab(model) -> None:
        for key, value in gguf_files.byte_vocabulary(model.hparams["vocab_size"]).items():
            gguf_files.add(model.gguf_writer, key, value)

    def replace(cls: type) -> None:
        if "set_vocab" in vars(cls):
            cls.set_vocab = set_vocab
        for subclass in cls.__subclasses__():
            replace(subclass)

    for module in pkgutil.iter_modules([f"{root}/conversion"]):
        if module.name in MODULES:
            importlib.import_module(f"conversion.{module.name}")
    replace(base.TextModel)
    sys.argv = ["convert_hf_to_gguf", checkpoint, "--outfile", output, "--outtype", "f32"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
