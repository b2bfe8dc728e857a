"""Hand exported model folders over to other programs.

The package writes GGUF files for llama.cpp, by llama.cpp's own converter, and Modelfiles for Ollama. It also tells what
vLLM and SGLang do with a folder, by rules read from their source code.
"""
