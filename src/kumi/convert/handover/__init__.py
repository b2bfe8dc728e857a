"""Exported folders for other programs.

It writes GGUF files and Modelfiles for llama.cpp and Ollama, by llama.cpp's own converter. It tells what vLLM and
SGLang do with a folder, by rules read from their source.
"""
