"""Write a GGUF file from an exported folder by llama.cpp's own converter.

The converter is a program of the user's copy of llama.cpp, run by the interpreter that runs kumi.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kumi.convert.convert import convert
from kumi.convert.handover.modelfile import modelfile_of, modelfile_text
from kumi.convert.handover.pre_tokenizer import pre_tokenizer_name
from kumi.errors import ConfigError, RefusedError
from kumi.files.output import write_text

CONVERTER = "convert_hf_to_gguf.py"
OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")

# Runs the converter of the folder argv[1]. Where the converter does not recognise the vocabulary, it takes argv[2] for
# the name of the rule that splits text, unless argv[2] is empty.
_PROGRAM = """
import runpy, sys
home, name, *arguments = sys.argv[1:]
sys.path[:0] = [home, home + "/gguf-py"]
if name:
    from conversion import base
    recognise = base.TextModel.get_vocab_base_pre
    def get_vocab_base_pre(self, tokenizer):
        try:
            return recognise(self, tokenizer)
        except NotImplementedError:
            print("kumi: the splitting rule is " + name, file=sys.stderr)
            return name
    base.TextModel.get_vocab_base_pre = get_vocab_base_pre
script = home + "/convert_hf_to_gguf.py"
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def write_gguf(folder: Path, target: Path, llama_cpp: Path, outtype: str = "auto") -> None:
    """Write the GGUF file `target` from the exported `folder` by the converter in `llama_cpp`, a copy of llama.cpp.

    outtype    number format of matrices, one of `OUTTYPES`; with "auto" the converter chooses one of 16 bits

    Raise ConfigError if `llama_cpp` has no converter, and RefusedError if `target` exists or the converter fails.
    """
    if not (llama_cpp / CONVERTER).is_file():
        raise ConfigError(
            f"--llama-cpp {llama_cpp}: has no {CONVERTER}; name a copy of llama.cpp, such as that of "
            "git clone https://github.com/ggml-org/llama.cpp"
        )
    if target.exists():
        raise RefusedError(f"{target}: exists; name another file, or delete it")
    partial = target.with_name(f".{target.name}.kumi-part")
    partial.unlink(missing_ok=True)
    name = pre_tokenizer_name(folder) or ""
    options = [str(folder.absolute()), "--outfile", str(partial.absolute()), "--outtype", outtype]
    command = [sys.executable, "-c", _PROGRAM, str(llama_cpp.absolute()), name, *options]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode or not partial.is_file():
        partial.unlink(missing_ok=True)
        raise RefusedError(f"{folder}: llama.cpp's converter refuses it: {_last_words(done.stderr)}")
    os.replace(partial, target)


def convert_to_gguf(
    source: str, target: Path, llama_cpp: Path, *, outtype: str = "auto", base: str | None = None
) -> str:
    """Write the GGUF file `target` from any model that `kumi.convert.convert` reads, and return what was written.

    A Modelfile for Ollama is written beside it. Adapters are merged. Errors are those of `convert`, `write_gguf` and
    `modelfile_text`. The Hugging Face folder in between is deleted.
    """
    modelfile = modelfile_of(target)
    for path in (target, modelfile):
        if path.exists():
            raise RefusedError(f"{path}: exists; name another file, or delete it")
    with tempfile.TemporaryDirectory(prefix=".kumi-gguf-", dir=target.absolute().parent) as scratch:
        folder = Path(scratch) / "hf"
        convert(source, folder, to="hf", verify=False, base=base)
        for_ollama = modelfile_text(folder, target)
        write_gguf(folder, target, llama_cpp, outtype)
    write_text(modelfile, for_ollama)
    return f"{source} -> {target}, by llama.cpp's converter in {llama_cpp}, and {modelfile} for Ollama"


def _last_words(stderr: str) -> str:
    """Return the error of the converter: its last line, and the remedy for a missing package."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'", last)
    return f"{last}; install it: pip install {missing[1]}" if missing else last
