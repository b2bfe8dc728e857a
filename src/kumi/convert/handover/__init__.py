"""Exported folders for other programs: GGUF files for llama.cpp and Ollama, by llama.cpp's own converter."""
