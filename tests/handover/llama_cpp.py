"""llama.cpp for tests: its converter, and its library through the bindings of llama-cpp-python.

`make handover` puts both into build/handover (`tests/handover/provide.py`); KUMI_LLAMA_CPP names another folder with
the same content: `llama.cpp` (source), `lib` (libllama) and `llama_cpp` (bindings).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

HOME = Path(os.environ.get("KUMI_LLAMA_CPP") or Path(__file__).parents[2] / "build" / "handover")
SOURCE = HOME / "llama.cpp"
# Packages that the converter needs and kumi's tests do not.
if (HOME / "tools").is_dir():
    sys.path.append(str(HOME / "tools"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HOME / "tools"))))


def converter() -> Path:
    """llama.cpp's source with its converter; the test is skipped where it is absent."""
    if not (SOURCE / "convert_hf_to_gguf.py").is_file():
        pytest.skip(f"llama.cpp's converter is not in {SOURCE}; `make handover` fetches it")
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("llama.cpp's converter needs sentencepiece; `make handover` installs it")
    return SOURCE


@cache
def gguf() -> Any:
    """The package gguf: that of llama.cpp's source, the same code as on the package index."""
    sys.path.insert(0, str(converter() / "gguf-py"))
    try:
        return importlib.import_module("gguf")
    finally:
        sys.path.pop(0)


@cache
def _library() -> Any:
    if not list((HOME / "lib").glob("libllama.*")):
        return None
    os.environ["LLAMA_CPP_LIB_PATH"] = str(HOME / "lib")
    # The package's own __init__ imports a server's requirements.
    package = ModuleType("llama_cpp")
    package.__path__ = [str(HOME / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    library = importlib.import_module("llama_cpp.llama_cpp")
    library.quiet = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(library.quiet, ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


def library() -> Any:
    """llama.cpp's functions; the test is skipped where its library was not built."""
    built = _library()
    if built is None:
        pytest.skip(f"llama.cpp is not built in {HOME / 'lib'}; `make handover` builds it (10 minutes of one core)")
    return built


class LlamaCpp:
    """A GGUF file in llama.cpp, computed in float32 with one thread."""

    def __init__(self, file: Path, context: int = 64) -> None:
        lib = self.lib = library()
        self.model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        assert self.model, file
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # float32
        params.flash_attn_type = 0
        self.context = lib.llama_init_from_model(self.model, params)
        assert self.context, file
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.size = lib.llama_vocab_n_tokens(self.vocab)

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits of every token of `ids`, (tokens, vocabulary), without a cache of earlier calls."""
        lib, length = self.lib, len(ids)
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        batch = lib.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        assert lib.llama_decode(self.context, batch) == 0
        rows = (lib.llama_get_logits_ith(self.context, index) for index in range(length))
        result = np.stack([np.ctypeslib.as_array(row, shape=(self.size,)).copy() for row in rows])
        lib.llama_batch_free(batch)
        return result

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens after `prompt`, each the likeliest."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`; special tokens in it are recognised, none is added."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), False, True)
        assert count >= 0
        return list(ids[:count])
