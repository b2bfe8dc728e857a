"""Exported folders for other programs.

GGUF files and Modelfiles for llama.cpp and Ollama, by llama.cpp's own converter; what vLLM and SGLang do with a folder,
by rules read from their source.
"""
